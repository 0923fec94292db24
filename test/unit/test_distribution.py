"""Collectives and wrappers, alone and in a group of one; mmcv is pretended where it is not there."""

import importlib.util
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mmcls.utils import distribution
from mmcls.utils.distribution import npu_distributed_data_parallel, wrap_distributed_model, wrap_non_distributed_model
from mmcls.utils.errors import RequestError

HAS_MMCV = importlib.util.find_spec("mmcv") is not None
CPU = torch.device("cpu")


class TwoInputs(nn.Module):
    """Takes its second input by keyword and keeps what it was given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(3, 2)
        self.seen = None

    def forward(self, x, y=None, *, scale=1.0):
        self.seen = (x, y, scale)
        return (self.linear(x) * scale - y).square().mean()


@pytest.fixture
def without_mmcv(monkeypatch):
    """Forgets an mmcv that was imported, and brings it back after the test."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmcv"]:
        monkeypatch.delitem(sys.modules, name)
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "mmcv"]:
        del sys.modules[name]


@pytest.fixture
def mmcv(tmp_path, monkeypatch, without_mmcv):
    """Installs an mmcv with the given source, which is really imported."""

    def install(source):
        (tmp_path / "mmcv").mkdir()
        (tmp_path / "mmcv" / "__init__.py").write_text(source)
        monkeypatch.syspath_prepend(tmp_path)

    return install


def refusal():
    with pytest.raises(RequestError) as caught:
        npu_distributed_data_parallel()
    assert caught.value.subject == "mmcv"
    return caught.value


def test_without_mmcv_the_npu_wrapper_is_refused(monkeypatch, without_mmcv):
    monkeypatch.setitem(sys.modules, "mmcv", None)
    error = refusal()
    assert error.problem == "needs mmcv 1.x for NPUDistributedDataParallel, found none"
    assert "--mmcv" in error.remedy


def test_mmcv_2_is_refused(mmcv):
    mmcv("__version__ = '2.1.0'")
    error = refusal()
    assert error.problem == "needs mmcv 1.x for NPUDistributedDataParallel, found 2.1.0"
    assert "--mmcv" in error.remedy


@pytest.mark.parametrize("source", ["", "import cv2_that_is_not_there", "raise ImportError('libGL.so.1: cannot open')"])
def test_an_mmcv_that_is_there_and_cannot_be_used_is_not_called_missing(mmcv, source):
    """Another package of the name; OpenCV without libGL, as on many servers."""
    mmcv(source)
    assert "found none" not in refusal().problem


@pytest.mark.skipif(not HAS_MMCV, reason="mmcv 1.7.2 is not installed (requirements-npu.txt)")
class TestNpuWrapper:
    """The class that 8-card NPU runs go through, on the CPU."""

    def test_it_is_mmcvs(self):
        from mmcv.device.npu import NPUDistributedDataParallel

        wrapper = npu_distributed_data_parallel()
        assert issubclass(wrapper, NPUDistributedDataParallel)
        assert wrapper.__name__ == "NPUDistributedDataParallel"

    def test_inputs_pass_unchanged(self, process_group):
        module = TwoInputs()
        x, y = torch.randn(4, 3), torch.randn(4, 2)
        npu_distributed_data_parallel()(module)(x, y=y, scale=2.0)
        assert module.seen[0] is x and module.seen[1] is y and module.seen[2] == 2.0

    def test_gradients_and_steps_equal_the_plain_wrapper(self, process_group):
        models = [npu_distributed_data_parallel()(TwoInputs()), DistributedDataParallel(TwoInputs())]
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(3):
            torch.manual_seed(step)
            x, y = torch.randn(4, 3), torch.randn(4, 2)
            for model, optimizer in zip(models, optimizers, strict=True):
                optimizer.zero_grad()
                model(x, y=y).backward()
                optimizer.step()
            for ours, plain in zip(models[0].parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=1e-6)
                torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)

    def test_accumulation_without_sync(self, process_group):
        model = npu_distributed_data_parallel()(TwoInputs())
        x, y = torch.randn(4, 3), torch.randn(4, 2)
        with model.no_sync():
            model(x, y=y).backward()
        model(x, y=y).backward()
        twice = [parameter.grad.clone() for parameter in model.parameters()]
        model.zero_grad()
        model(x, y=y).backward()
        for double, single in zip(twice, model.parameters(), strict=True):
            torch.testing.assert_close(double, 2 * single.grad)

    def test_wrap_distributed_model_chooses_it(self, process_group, monkeypatch):
        chosen = []
        monkeypatch.setattr(
            distribution, "npu_distributed_data_parallel", lambda: lambda *a, **k: chosen.append((a, k))
        )
        monkeypatch.setattr(distribution.torch, "device", lambda _: _Npu)
        wrap_distributed_model("model", _Npu, bucket_cap_mb=1)
        ((arguments, options),) = chosen
        assert arguments == ("model",)
        assert (options["device_ids"], options["bucket_cap_mb"]) == ([2], 1)


class _Npu:
    type, index = "npu", 2


def test_the_cpu_has_torchs_wrapper_without_device_ids(process_group):
    module = TwoInputs()
    model = wrap_distributed_model(module, "cpu")
    assert type(model) is DistributedDataParallel
    assert model.device_ids is None and model.module is module
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    model(x, y=y).backward()
    gradients = [parameter.grad.clone() for parameter in module.parameters()]
    module.zero_grad()
    module(x, y=y).backward()
    for wrapped, plain in zip(gradients, module.parameters(), strict=True):
        torch.testing.assert_close(wrapped, plain.grad, rtol=0, atol=1e-6)


def test_the_non_distributed_wrapper_moves_the_model():
    module = nn.Linear(2, 2)
    assert wrap_non_distributed_model(module, "meta") is module
    assert module.weight.device.type == "meta"


def test_alone_there_is_no_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    distribution.init_process_group(CPU, None, 10.0)
    assert not dist.is_initialized()
    assert (distribution.get_rank(), distribution.get_world_size()) == (0, 1)
    distribution.destroy_process_group()
    tensor = torch.tensor([1.0, 2.0])
    assert distribution.sum_over_ranks(tensor) is tensor
    assert distribution.min_over_ranks(tensor) is tensor
    assert tensor.tolist() == [1.0, 2.0]
    assert distribution.same_on_all_ranks(7, CPU)


@pytest.mark.parametrize(
    ("device_type", "asked", "backend"), [("cpu", None, "gloo"), ("cuda", None, "nccl"), ("cuda", "gloo", "gloo")]
)
def test_the_backend_of_a_group(monkeypatch, device_type, asked, backend):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    joined = {}
    monkeypatch.setattr(dist, "init_process_group", lambda name, timeout: joined.update(name=name, timeout=timeout))
    distribution.init_process_group(torch.device(device_type), asked, 12.5)
    assert (joined["name"], joined["timeout"].total_seconds()) == (backend, 12.5)


def test_in_a_group_of_one(process_group):
    assert (distribution.get_rank(), distribution.get_world_size()) == (0, 1)
    assert distribution.sum_over_ranks(torch.tensor([2.0])).tolist() == [2.0]
    assert distribution.min_over_ranks(torch.tensor([2**62])).tolist() == [2**62]
    assert distribution.same_on_all_ranks(7, CPU)


@pytest.fixture
def second_rank(monkeypatch):
    """Pretends a group of two, in which the other rank gives the tensors that the test lists."""
    given = []

    def all_reduce(tensor, op=dist.ReduceOp.SUM):
        other = given.pop(0).to(tensor.dtype)
        combine = {dist.ReduceOp.MAX: torch.maximum, dist.ReduceOp.MIN: torch.minimum, dist.ReduceOp.SUM: torch.add}
        tensor.copy_(combine[op](tensor, other))

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    return given


@pytest.mark.parametrize(("other", "same"), [(7, True), (8, False), (6, False), (0, False)])
def test_a_number_that_differs_on_another_rank(second_rank, other, same):
    second_rank.append(torch.tensor([other, -other]))
    assert distribution.same_on_all_ranks(7, CPU) is same


def test_the_smallest_of_all_ranks(second_rank):
    second_rank.append(torch.tensor([4, 2**62]))
    tensor = torch.tensor([3, 2**62 + 1])
    assert distribution.min_over_ranks(tensor) is tensor
    assert tensor.tolist() == [3, 2**62]


def test_statistics_of_norms_become_their_mean(second_rank):
    model = nn.Sequential(nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.Sequential(nn.BatchNorm2d(3)))
    model[1].running_mean.copy_(torch.tensor([1.0, 3.0]))
    model[1].num_batches_tracked.fill_(5)
    second_rank.append(torch.tensor([3.0, 5.0, 2.0, 2.0, 4.0, 4.0, 4.0, 3.0, 3.0, 3.0]))
    weights = model[0].weight.clone()
    distribution.average_norm_statistics(dict(model.named_buffers()))
    assert model[1].running_mean.tolist() == [2.0, 4.0]
    assert model[1].running_var.tolist() == [1.5, 1.5]
    assert model[2][0].running_mean.tolist() == [2.0, 2.0, 2.0]
    assert model[2][0].running_var.tolist() == [2.0, 2.0, 2.0]
    assert model[1].num_batches_tracked.item() == 5
    assert torch.equal(model[0].weight, weights)


def test_a_model_without_norms_needs_no_collective(second_rank):
    distribution.average_norm_statistics(nn.Linear(2, 2).state_dict())


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("Connection closed by peer [127.0.0.1]:5"), True),
        (RuntimeError("Broken pipe"), True),
        (RuntimeError("EI0002: timeout"), True),
        (dist.DistNetworkError("gone"), True),
        (RuntimeError("shape mismatch"), False),
        (OSError("Broken pipe"), False),
    ],
)
def test_which_errors_are_those_of_another_rank(error, expected):
    assert distribution.is_communication_error(error) is expected
