"""When a loss stops being finite and which tensor is to blame, on a small ResNet with one fault at a time."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from image_classification.divergence import FirstBadStep, first_non_finite
from image_classification.resnet import build_resnet
from mmcls.utils.distribution import wrap_distributed_model

INF, NAN = float("inf"), float("nan")


def read_of(losses):
    first = FirstBadStep("cpu")
    for step, loss in enumerate(losses, start=10):
        first.add(torch.tensor(loss, requires_grad=True), step)
    return first.read()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_the_first_bad_step_is_remembered(bad):
    assert read_of([1.0, 3e38, 0.0]) is None
    assert read_of([1.0, 2.0, bad, 3.0, -bad]) == (12, str(bad))
    assert read_of([bad]) == (10, str(bad))


def test_a_reading_without_a_find_changes_nothing():
    first = FirstBadStep("cpu")
    first.add(torch.tensor(1.0), 0)
    assert first.read() is None
    first.add(torch.tensor(NAN), 1)
    assert first.read() == first.read() == (1, "nan")
    first.add(torch.tensor(INF), 2)
    assert first.read() == (1, "nan")


def test_micro_batches_of_a_step_count_for_it():
    first = FirstBadStep("cpu")
    for loss in (1.0, NAN, 1.0):
        first.add(torch.tensor(loss, dtype=torch.float16), 7)
    assert first.read() == (7, "nan")


@pytest.mark.parametrize(
    ("other", "expected"), [(3, (3, "not finite")), (9, (5, "nan")), (torch.iinfo(torch.int64).max, (5, "nan"))]
)
def test_the_smallest_of_all_ranks_is_told(monkeypatch, other, expected):
    def all_reduce(tensor, op):
        assert (op, tensor.dtype) == (dist.ReduceOp.MIN, torch.int64)
        tensor.clamp_(max=other)

    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    first = FirstBadStep("cpu")
    first.add(torch.tensor(NAN), 5)
    assert first.read() == expected


def test_adding_reads_nothing_from_the_device():
    """Tensors on the meta device have no values: only `read` may want one."""
    first = FirstBadStep("meta")
    first.add(torch.zeros((), device="meta"), 0)
    with pytest.raises((RuntimeError, NotImplementedError)):
        first.read()


class Case:
    """A network, a batch and the pass that `first_non_finite` runs."""

    def __init__(self, model=lambda module: module):
        torch.manual_seed(0)
        self.module = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125).train()
        self.model = model(self.module)
        self.images, self.labels = torch.randn(4, 3, 8, 8), torch.arange(4)
        self.scale = 1.0

    def loss(self):
        return F.cross_entropy(self.model(self.images), self.labels) * self.scale

    def find(self):
        return first_non_finite(self.module, self.loss)


@pytest.fixture
def case():
    return Case()


def spoil(tensor, value=NAN):
    with torch.no_grad():
        tensor.view(-1)[-1] = value


def test_all_finite(case):
    before = {name: value.clone() for name, value in case.module.named_parameters()}
    assert case.find() is None
    assert all(torch.equal(value, before[name]) for name, value in case.module.named_parameters())
    assert all(parameter.grad is None for parameter in case.module.parameters())


@pytest.mark.parametrize("value", [NAN, INF])
def test_weights_come_first(case, value):
    spoil(case.module.fc.bias)
    spoil(case.module.layer1[0].conv1.weight, value)
    spoil(case.module.bn1.running_mean)
    spoil(case.images)
    assert case.find() == "weight layer1.0.conv1.weight"


def test_then_statistics(case):
    spoil(case.module.layer2[0].downsample[1].running_var)
    spoil(case.images)
    assert case.find() == "statistic layer2.0.downsample.1.running_var"


def test_then_the_images(case):
    spoil(case.images, INF)
    assert case.find() == "images"


def test_then_outputs_in_the_order_of_execution(case):
    """layer4 is registered after layer2 and before fc; the hooks of the faults run after the layers have run."""
    for name in ("layer4.1.bn2", "layer2.0.conv2", "fc"):
        layer = case.module.get_submodule(name)
        layer.forward = lambda x, forward=layer.forward: forward(x) * INF
    assert case.find() == "output of layer2.0.conv2"


def test_a_sum_that_overflows_is_the_output_of_the_next_layer_and_not_the_images(case):
    """The first block's sum lies between two layers; the ReLU after it works in place and passes inf on."""
    block = case.module.layer1[0]
    for layer in (block.bn2, block.downsample):
        layer.register_forward_hook(lambda layer, inputs, output: torch.full_like(output, 3e38))
    assert case.find() == "output of layer1.0.relu"


def test_outputs_that_overflow_in_half_precision_under_autocast(case):
    with torch.no_grad():
        case.module.layer1[1].bn2.weight.fill_(1e6)
        case.module.layer1[1].bn2.bias.fill_(1e6)
    module = case.module.eval()

    class Autocast(nn.Module):
        def forward(self, images):
            with torch.autocast("cpu", dtype=torch.float16):
                return module(images)

    case.model = Autocast()
    assert case.find() in ("output of layer1.1.bn2", "output of layer2.0.conv1")


def test_then_the_loss(case):
    case.scale = INF
    assert case.find() == "loss"


class BadGradient(torch.autograd.Function):
    """The identity, whose gradient is nan."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * NAN


def spoil_gradient_behind(module, name):
    module.get_submodule(name).register_forward_hook(lambda layer, inputs, output: BadGradient.apply(output))


def test_then_gradients_from_the_last_layer_on(case):
    spoil_gradient_behind(case.module, "fc")
    assert case.find() == "gradient of fc.weight"


def test_gradients_before_the_fault_are_finite(case):
    spoil_gradient_behind(case.module, "layer3.1.bn1")
    assert case.find() == "gradient of layer3.1.bn1.weight"


def test_frozen_weights_have_no_gradient_to_look_at(case):
    spoil_gradient_behind(case.module, "fc")
    case.module.fc.requires_grad_(False)
    assert case.find() == "gradient of layer4.1.bn2.weight"


def num_hooks(module):
    return sum(len(layer._forward_hooks) for layer in module.modules())


@pytest.mark.parametrize("fault", [None, "images"])
def test_the_hooks_are_removed(case, fault):
    if fault:
        spoil(case.images)
    assert case.find() == fault
    assert num_hooks(case.module) == 0


def test_the_hooks_are_removed_after_a_failure(case):
    def fail():
        assert num_hooks(case.module) > 20
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        first_non_finite(case.module, fail)
    assert num_hooks(case.module) == 0


@pytest.mark.parametrize("fault", ["gradient", "output"])
def test_the_wrapper_of_the_ranks_is_run_but_never_averages(process_group, fault):
    case = Case(model=lambda module: wrap_distributed_model(module, "cpu"))
    averaged = []
    case.model.register_comm_hook(None, lambda _, bucket: averaged.append(bucket))
    if fault == "output":
        case.module.fc.forward = lambda x: x[:, :10] * NAN
        assert case.find() == "output of fc"
    else:
        spoil_gradient_behind(case.module, "fc")
        assert case.find() == "gradient of fc.weight"
    assert not averaged
