"""Devices on a machine that may have none: torch_npu is pretended."""

import random
import sys
import types

import numpy as np
import pytest
import torch

from mmcls.utils import device
from mmcls.utils.errors import RequestError


@pytest.fixture
def torch_npu(tmp_path, monkeypatch):
    """Installs a torch_npu with the given source, which is really imported."""

    def install(source):
        (tmp_path / "torch_npu").mkdir()
        (tmp_path / "torch_npu" / "__init__.py").write_text(source)
        monkeypatch.delitem(sys.modules, "torch_npu", raising=False)
        monkeypatch.syspath_prepend(tmp_path)

    yield install
    sys.modules.pop("torch_npu", None)


@pytest.fixture
def no_torch_npu(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_npu", None)


REAL_CUDA = torch.cuda
NPU = types.SimpleNamespace(type="npu")  # torch knows the name only where torch_npu has told it


class FakeModule(types.SimpleNamespace):
    """Stands for `torch.npu` or `torch.cuda` and keeps what was called."""

    def __init__(self, cards):
        self.calls = []
        super().__init__(
            device_count=lambda: cards,
            set_device=lambda card: self.calls.append(("set_device", card)),
            synchronize=lambda where: self.calls.append(("synchronize", where)),
            manual_seed=lambda seed: self.calls.append(("manual_seed", seed)),
            get_device_name=lambda where: "Card X",
            max_memory_allocated=lambda where: 123,
        )

    def __getattr__(self, name):
        return getattr(REAL_CUDA, name)  # torch itself looks into torch.cuda


@pytest.fixture
def cards(monkeypatch):
    """Pretends cards of npu and cuda; torch_npu loads."""

    def pretend(npu=0, cuda=0):
        monkeypatch.setitem(sys.modules, "torch_npu", types.ModuleType("torch_npu"))
        modules = {"npu": FakeModule(npu), "cuda": FakeModule(cuda)}
        monkeypatch.setattr(torch, "npu", modules["npu"], raising=False)
        monkeypatch.setattr(torch, "cuda", modules["cuda"])
        device._npu_has.cache_clear()
        return modules

    return pretend


def test_without_torch_npu_there_is_no_npu(no_torch_npu):
    assert device.load_torch_npu() is None
    assert device.device_count("npu") == 0


def test_a_torch_npu_that_loads_is_given(torch_npu):
    torch_npu("name = 'stub'")
    assert device.load_torch_npu().name == "stub"


@pytest.mark.parametrize(
    ("source", "problem", "remedy"),
    [
        ("raise ImportError('libhccl.so: cannot open shared object file')", "libhccl.so", "set_env.sh"),
        ("raise OSError('libascendcl.so: cannot open shared object file')", "libascendcl.so", "set_env.sh"),
        ("raise ImportError('/x/libtorch_npu.so: undefined symbol: _ZN2at')", "undefined symbol", "must fit together"),
        ("raise RuntimeError('Two accelerators cannot be used at the same time')", "Two accelerators", "fit together"),
        ("raise AttributeError(\"module 'torch._C' has no attribute '_x'\")", "torch._C", "fit together"),
        ("raise ImportError('torch_npu._C is missing')", "_C is missing", "--device=cpu"),
        ("import decorator_that_is_not_there", "decorator_that_is_not_there", "pip install"),
    ],
)
@pytest.mark.parametrize(
    "function", [device.load_torch_npu, device.auto_select_device, lambda: device.device_count("npu")]
)
def test_a_torch_npu_that_cannot_load_is_never_passed_over(torch_npu, function, source, problem, remedy):
    torch_npu(source)
    with pytest.raises(RequestError) as caught:
        function()
    assert caught.value.subject == "torch_npu"
    assert problem in caught.value.problem and remedy in caught.value.remedy
    assert "\n" not in str(caught.value)


def test_a_broken_torch_npu_does_not_disturb_the_cpu(torch_npu):
    torch_npu("raise ImportError('libhccl.so: cannot open shared object file')")
    cpu = device.set_device("cpu", 0)
    assert cpu == torch.device("cpu")
    device.synchronize(cpu)
    device.seed_everything(1, cpu)
    device.use_full_float32(cpu)
    assert device.device_count("cpu") == 0
    assert device.device_name(cpu) and device.peak_memory_bytes(cpu) > 2**20


@pytest.mark.parametrize(("npu", "cuda", "best"), [(2, 2, "npu"), (0, 1, "cuda"), (1, 0, "npu"), (0, 0, "cpu")])
def test_the_best_device(cards, npu, cuda, best):
    cards(npu, cuda)
    assert device.auto_select_device() == best


def test_what_is_visible_and_why(cards, monkeypatch):
    cards(npu=2, cuda=1)
    monkeypatch.setenv(device.NPU_MASK, "0,1")
    monkeypatch.delenv(device.CUDA_MASK, raising=False)
    assert device.visible_cards_text("npu") == "2 npu visible (ASCEND_RT_VISIBLE_DEVICES=0,1)"
    assert device.visible_cards_text("cuda") == "1 cuda visible"


def test_an_empty_mask_explains_why_there_is_no_card(cards, monkeypatch):
    cards()
    monkeypatch.setenv(device.CUDA_MASK, "")
    assert "CUDA_VISIBLE_DEVICES=" in device.visible_cards_text("cuda")


def test_a_rank_takes_its_card(cards):
    modules = cards(cuda=4)
    assert device.set_device("cuda", 3) == torch.device("cuda", 3)
    assert modules["cuda"].calls == [("set_device", 3)]


def test_the_calls_of_a_card(cards):
    modules, card = cards(cuda=4), torch.device("cuda", 1)
    device.synchronize(card)
    device.seed_everything(7, card)
    assert modules["cuda"].calls == [("synchronize", card), ("manual_seed", 7)]
    assert (device.device_name(card), device.peak_memory_bytes(card)) == ("Card X", 123)
    assert modules["npu"].calls == []


def test_seeds_reach_python_numpy_and_torch():
    def draws(seed):
        device.seed_everything(seed, torch.device("cpu"))
        return random.random(), np.random.rand(), torch.rand(1).item()

    assert draws(5) == draws(5)
    assert not set(draws(5)) & set(draws(6))
    draws(2**63 - 1)


def test_float32_is_float32_on_cuda():
    switches = (torch.backends.cuda.matmul, torch.backends.cudnn)
    before = [switch.allow_tf32 for switch in switches]
    try:
        for switch in switches:
            switch.allow_tf32 = True
        device.use_full_float32(torch.device("cuda"))
        assert [switch.allow_tf32 for switch in switches] == [False, False]
    finally:
        for switch, value in zip(switches, before, strict=True):
            switch.allow_tf32 = value


def test_float32_is_float32_on_the_npu(cards):
    npu = cards(npu=1)["npu"]
    npu.conv, npu.matmul = types.SimpleNamespace(allow_hf32=True), types.SimpleNamespace(allow_hf32=True)
    chosen = {}
    npu.set_option = chosen.update
    device.use_full_float32(NPU)
    assert (npu.conv.allow_hf32, npu.matmul.allow_hf32) == (False, False)
    assert chosen == {"ACL_PRECISION_MODE": "must_keep_origin_dtype"}


def test_an_older_torch_npu_without_a_switch_is_warned_of_once(cards):
    npu = cards(npu=1)["npu"]
    npu.matmul, npu.set_option = types.SimpleNamespace(allow_hf32=True), lambda options: None
    with pytest.warns(UserWarning, match=r"no torch\.npu\.conv") as caught:
        device.use_full_float32(NPU)
        device.use_full_float32(NPU)
    assert len(caught) == 1
    assert npu.matmul.allow_hf32 is False


@pytest.mark.parametrize("mask", ["1,0", "0,0", "a,b", "", "0,", "-1", "0 1"])
def test_a_mask_that_is_no_rising_list(cards, monkeypatch, mask):
    cards(npu=2)
    monkeypatch.setenv(device.NPU_MASK, mask)
    with pytest.raises(RequestError, match="rising list") as caught:
        device.check_npu_mask()
    assert caught.value.subject == f"{device.NPU_MASK}={mask}"


def test_a_mask_with_a_card_that_is_not_there_names_it(cards, monkeypatch):
    cards(npu=1)
    monkeypatch.setenv(device.NPU_MASK, "0,99")
    with pytest.raises(RequestError, match="card 99 is not there, 1 visible"):
        device.check_npu_mask()


def test_a_mask_that_fits(cards, monkeypatch):
    cards(npu=2)
    monkeypatch.delenv(device.NPU_MASK, raising=False)
    device.check_npu_mask()
    monkeypatch.setenv(device.NPU_MASK, "3,5")
    device.check_npu_mask()


def test_the_scaler_fits_the_chip(cards):
    """A chip without inf in float16 saturates: only torch_npu's own scaler sees its overflows."""
    npu = cards(npu=1)["npu"]
    npu.amp = types.SimpleNamespace(GradScaler=lambda: "torch_npu's")
    npu.utils = types.SimpleNamespace(is_support_inf_nan=lambda: False)
    assert device.make_grad_scaler(NPU, enabled=True) == "torch_npu's"
    scaler = device.make_grad_scaler(torch.device("cpu"), enabled=True)
    assert type(scaler) is torch.amp.GradScaler and scaler.is_enabled()
    assert not device.make_grad_scaler(torch.device("cpu"), enabled=False).is_enabled()


@pytest.mark.parametrize(
    ("flags", "fast"), [("fpu avx512_bf16 sse", True), ("fpu avx512f amx_bf16_x", False), ("", False)]
)
def test_a_cpu_is_fast_in_bfloat16_only_with_its_instructions(monkeypatch, flags, fast):
    monkeypatch.setattr(device, "_processor_field", lambda name: flags if name == "flags" else "")
    assert device.has_fast_half(torch.device("cpu")) is fast
    assert device.has_fast_half(torch.device("cuda")) is True


def test_the_short_type():
    assert device.half_type(torch.device("cpu")) == torch.bfloat16
    assert device.half_type(torch.device("cuda")) == torch.float16
    assert device.half_type(NPU) == torch.float16
