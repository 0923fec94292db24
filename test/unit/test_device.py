"""Devices on a machine that may have none: torch_npu is pretended."""

import random
import subprocess
import sys
import types
from pathlib import Path

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


class TalkingScaler(torch.amp.GradScaler):
    """Takes no device and prints, as torch_npu's does."""

    def __init__(self, init_scale=2.0**16, enabled=True):
        super().__init__("cpu", init_scale, enabled=enabled)

    def step(self, optimizer):
        print("Gradient overflow. Skipping step")
        return super().step(optimizer)

    def update(self, new_scale=None):
        print("Loss scaler reducing loss scale")
        super().update(new_scale)


@pytest.fixture
def npu_scaler(cards):
    """Makes the scaler of an NPU whose chip has inf in float16, or has not."""
    npu = cards(npu=1)["npu"]

    def make(has_infinity, *arguments, **options):
        npu.amp = types.SimpleNamespace(GradScaler=TalkingScaler)
        npu.utils = types.SimpleNamespace(is_support_inf_nan=lambda: has_infinity)
        return device.make_grad_scaler(NPU, *arguments, **options)

    return make


def test_the_scaler_fits_the_chip(npu_scaler):
    """A chip without inf in float16 saturates: only torch_npu's own scaler sees its overflows."""
    scaler = npu_scaler(False, 8.0, enabled=True)
    assert isinstance(scaler, TalkingScaler)
    assert (scaler.get_scale(), scaler.is_enabled()) == (8.0, True)


@pytest.mark.parametrize(("device_type", "init_scale"), [("cpu", 8.0), ("cpu", 2.0**16)])
def test_other_devices_have_the_scaler_of_torch(device_type, init_scale):
    scaler = device.make_grad_scaler(torch.device(device_type), init_scale, enabled=True)
    assert type(scaler) is torch.amp.GradScaler
    assert (scaler.get_scale(), scaler.is_enabled()) == (init_scale, True)


@pytest.mark.parametrize(("has_infinity", "enabled"), [(True, True), (True, False), (False, False)])
def test_an_npu_takes_the_scaler_of_torch_where_it_serves(npu_scaler, monkeypatch, has_infinity, enabled):
    made = []
    monkeypatch.setattr(torch.amp, "GradScaler", lambda *arguments, **options: made.append((arguments, options)))
    npu_scaler(has_infinity, 4.0, enabled=enabled)
    assert made == [(("npu", 4.0), {"enabled": enabled})]


def test_without_scaling_the_loss_stays_as_it_is():
    scaler = device.make_grad_scaler(torch.device("cpu"), 1.0, enabled=False)
    assert not scaler.is_enabled() and scaler.get_scale() == 1.0
    loss = torch.ones(())
    assert scaler.scale(loss) is loss


def test_the_scaler_of_torch_npu_keeps_quiet_and_works(npu_scaler, capsys):
    """One line per overflow would bury the log of a run; they are counted."""
    scaler = npu_scaler(False, 4.0, enabled=True)
    weight = torch.nn.Parameter(torch.tensor(1.0))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    for factor, expected, scale in ((3.0, -0.5, 4.0), (float("inf"), -0.5, 2.0)):
        weight.grad = None
        scaler.scale(weight * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert (weight.item(), scaler.get_scale()) == (expected, scale)
    assert capsys.readouterr().out == ""
    print("others are heard")
    assert capsys.readouterr().out == "others are heard\n"


DETERMINISTIC = """
import os, torch
from mmcls.utils.device import make_deterministic
names = ("CUBLAS_WORKSPACE_CONFIG", "HCCL_DETERMINISTIC")
for device_type, values in (("cpu", {}), ("cuda", {}), ("npu", {}), ("npu", dict(zip(names, (":16:8", "strict"))))):
    for name in names:
        os.environ.pop(name, None)
    os.environ.update(values)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = True
    make_deterministic(device_type)
    assert torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.utils.deterministic.fill_uninitialized_memory
    print(device_type, *(os.environ.get(name) for name in names))
"""


def test_deterministic_kernels_and_the_users_own_variables():
    """In a process of its own, as it changes the process."""
    folder = Path(device.__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", DETERMINISTIC], cwd=folder, capture_output=True, text=True)
    lines = ["cpu :4096:8 None", "cuda :4096:8 None", "npu :4096:8 true", "npu :16:8 strict"]
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (0, lines, "")


@pytest.mark.parametrize(
    ("flags", "fast"), [("fpu avx512_bf16 sse", True), ("fpu avx512f amx_bf16_x", False), ("", False)]
)
def test_a_cpu_is_fast_in_bfloat16_only_with_its_instructions(monkeypatch, flags, fast):
    monkeypatch.setattr(device, "_processor_field", lambda name: flags if name == "flags" else "")
    assert device.has_fast_half("cpu", torch.bfloat16) is fast
    assert device.has_fast_half("cpu", torch.float16) is False
    assert device.has_fast_half("cuda", torch.float16) is True


def test_the_short_type():
    assert device.default_half_type("cpu") == torch.bfloat16
    assert device.default_half_type("cuda") == torch.float16
    assert device.default_half_type("npu") == torch.float16


@pytest.mark.parametrize("supported", [True, False])
@pytest.mark.parametrize("device_type", ["npu", "cuda"])
def test_a_card_is_asked_for_bfloat16(cards, device_type, supported):
    # CUDA's counts emulation unless told otherwise; torch_npu's of some versions takes no argument.
    answers = {"npu": lambda: supported, "cuda": lambda including_emulation=True: including_emulation or supported}
    cards(npu=1, cuda=1)[device_type].is_bf16_supported = answers[device_type]
    assert device.supports_bfloat16(device_type) is supported


def test_every_cpu_computes_in_bfloat16(monkeypatch):
    monkeypatch.setattr(device, "_processor_field", lambda name: "")
    assert device.supports_bfloat16("cpu") is True
