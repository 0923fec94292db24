"""Everything that differs between NPU, CUDA and CPU, and the only importer of torch_npu.

Device types are `npu`, `cuda` and `cpu`; cards are numbered from 0 among those that are visible.
"""

import contextlib
import os
import platform
import random
import resource
import warnings
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from mmcls.utils.errors import RequestError

BACKENDS = {"npu": "hccl", "cuda": "nccl", "cpu": "gloo"}
NPU_MASK = "ASCEND_RT_VISIBLE_DEVICES"
CUDA_MASK = "CUDA_VISIBLE_DEVICES"
SET_ENV_HINT = "source /usr/local/Ascend/ascend-toolkit/set_env.sh"


def load_torch_npu() -> ModuleType | None:
    """Imports torch_npu, which adds `torch.npu`; None where it is not installed.

    Raises:
        RequestError: torch_npu is installed but cannot load. Going on without it would train on the CPU unnoticed.
    """
    try:
        import torch_npu
    except ModuleNotFoundError as error:
        if error.name == "torch_npu":
            return None
        raise RequestError("torch_npu", f"needs the package {error.name}", f"pip install {error.name}") from error
    except Exception as error:  # a torch_npu for another torch fails in any way, AttributeError among them
        raise _unloadable(error) from error
    return torch_npu


def _unloadable(error: Exception) -> RequestError:
    text = " ".join(str(error).split())
    if isinstance(error, AttributeError) or "undefined symbol" in text or "Two accelerators" in text:
        remedy = "torch, torch_npu and CANN must fit together: see the table in README.md"
    elif ".so" in text:
        remedy = SET_ENV_HINT
    else:
        remedy = "check the installation, or take --device=cpu"
    return RequestError("torch_npu", f"cannot load ({text[:200]})", remedy)


def _module(device_type: str) -> ModuleType | None:
    """`torch.npu` or `torch.cuda`; None for the CPU, and for npu where torch_npu is not installed."""
    if device_type == "npu":
        return torch.npu if load_torch_npu() else None
    return torch.cuda if device_type == "cuda" else None


def device_count(device_type: str) -> int:
    """Number of visible cards of this type; 0 where there are none, and for the CPU."""
    module = _module(device_type)
    return module.device_count() if module else 0


def auto_select_device() -> str:
    """The best device type here: npu, then cuda, then cpu.

    Raises:
        RequestError: torch_npu is installed but cannot load, or the mask hides all its cards by mistake.
    """
    if os.environ.get(NPU_MASK) and load_torch_npu():
        check_npu_mask()
    return next((device_type for device_type in ("npu", "cuda") if device_count(device_type) > 0), "cpu")


def visible_cards_text(device_type: str) -> str:
    """How many cards are visible and why, for error lines: `2 npu visible (ASCEND_RT_VISIBLE_DEVICES=0,1)`."""
    mask_name = NPU_MASK if device_type == "npu" else CUDA_MASK
    mask = os.environ.get(mask_name)
    return f"{device_count(device_type)} {device_type} visible" + (f" ({mask_name}={mask})" if mask is not None else "")


def check_npu_mask() -> None:
    """Checks ASCEND_RT_VISIBLE_DEVICES: CANN silently drops the cards from the first bad or falling number on.

    Raises:
        RequestError: the mask is not a rising list of numbers, or names a card that is not there.
    """
    mask = os.environ.get(NPU_MASK)
    if mask is None:
        return
    ids = mask.split(",")
    numbers = [int(part) for part in ids if part.isascii() and part.isdecimal()]
    if len(numbers) < len(ids) or numbers != sorted(set(numbers)):
        raise RequestError(f"{NPU_MASK}={mask}", "is not a rising list of card numbers", f"write {NPU_MASK}=0,1,2")
    count = device_count("npu")
    if count < len(ids):
        raise RequestError(
            f"{NPU_MASK}={mask}",
            f"card {ids[count]} is not there, {count} visible",
            "name only cards of `npu-smi info`",
        )


def set_device(device_type: str, card: int) -> torch.device:
    """Makes card number `card` the current one of this process; the CPU has no numbers."""
    module = _module(device_type)
    if module is None:
        return torch.device("cpu")
    module.set_device(card)
    return torch.device(device_type, card)


def use_full_float32(device: torch.device) -> None:
    """Switches off the shorter types that cards use for float32 by default.

    CUDA multiplies in TF32. NPUs round the inputs of convolutions (`conv.allow_hf32`), and first-generation ones
    compute float32 in float16 unless ACL_PRECISION_MODE says otherwise.
    """
    if device.type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
    elif device.type == "npu":
        if _npu_has("conv"):
            torch.npu.conv.allow_hf32 = False
        if _npu_has("matmul"):
            torch.npu.matmul.allow_hf32 = False
        if _npu_has("set_option"):
            torch.npu.set_option({"ACL_PRECISION_MODE": "must_keep_origin_dtype"})


@cache
def _npu_has(name: str) -> bool:
    """Whether this torch_npu has `torch.npu.<name>`; warns once where it is too old for it."""
    found = hasattr(torch.npu, name)
    if not found:
        warnings.warn(f"this torch_npu has no torch.npu.{name}; going on without it", stacklevel=3)
    return found


def is_simulated(device: torch.device) -> bool:
    """Whether the card is the simulated NPU of test/npu_simulator."""
    return device.type == "npu" and getattr(load_torch_npu(), "SIMULATED", False)


def saturates(device: torch.device) -> bool:
    """Whether float16 has no inf on this card, but the largest number and a flag in its place."""
    return device.type == "npu" and not torch.npu.utils.is_support_inf_nan()


def make_grad_scaler(device: torch.device, init_scale: float, enabled: bool, **options: float) -> torch.amp.GradScaler:
    """The loss scaler that fits the chip; the options are those of torch's GradScaler.

    First-generation NPUs have no inf in float16: they saturate and set a flag, which only torch_npu's scaler reads.
    """
    if enabled and saturates(device):
        return _quiet(torch.npu.amp.GradScaler)(init_scale, **options)
    return torch.amp.GradScaler(device.type, init_scale, enabled=enabled, **options)


def _quiet(scaler: type[torch.amp.GradScaler]) -> type[torch.amp.GradScaler]:
    """torch_npu's scaler without the lines that it prints to stdout at every overflow; they are counted instead."""

    class QuietGradScaler(scaler):
        def step(self, *arguments, **options):
            with contextlib.redirect_stdout(None):
                return super().step(*arguments, **options)

        def update(self, *arguments, **options):
            with contextlib.redirect_stdout(None):
                return super().update(*arguments, **options)

    return QuietGradScaler


def make_deterministic(device_type: str) -> None:
    """Takes only kernels that give the same bits each time; torch raises where an operation has none.

    To be called before the first operation of this process: cuBLAS and HCCL read their variables then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if device_type == "npu":
        os.environ.setdefault("HCCL_DETERMINISTIC", "true")
    torch.use_deterministic_algorithms(True)
    # Filling memory that is overwritten anyway costs time and proves nothing here.
    torch.utils.deterministic.fill_uninitialized_memory = False


def synchronize(device: torch.device) -> None:
    """Waits until the device has done everything that was asked of it; the CPU always has."""
    module = _module(device.type)
    if module is not None:
        module.synchronize(device)


class SideStream:
    """A second queue of work on a card, for what runs beside the training step; used from one thread.

    Work inside `with stream:` is queued there, after what was queued before the stream was made.
    """

    def __init__(self, device: torch.device):
        self._module, self._device = _module(device.type), device
        self._stream = self._module.Stream(device=device)
        self._stream.wait_stream(self._module.current_stream(device))

    def __enter__(self) -> None:
        self._context = self._module.stream(self._stream)
        self._context.__enter__()

    def __exit__(self, *error) -> None:
        self._context.__exit__(*error)

    def mark(self) -> torch.Event:
        """A mark behind the work that was queued so far."""
        return self._stream.record_event()

    def hand_over(self, mark: torch.Event, tensors: Iterable[torch.Tensor]) -> None:
        """Lets the caller's stream use tensors of this one: it waits for the mark, the host does not."""
        current = self._module.current_stream(self._device)
        current.wait_event(mark)
        for tensor in tensors:
            # Else their memory could be given out again while that stream still reads it.
            tensor.record_stream(current)


def side_stream(device: torch.device) -> SideStream | None:
    """A side stream of a card; None for the CPU."""
    return None if _module(device.type) is None else SideStream(device)


def seed_everything(seed: int, device: torch.device) -> None:
    """Seeds Python, numpy, torch and the current card."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)
    module = _module(device.type)
    if module is not None:
        module.manual_seed(seed)


def _processor_field(name: str) -> str:
    """A field of the first processor of /proc/cpuinfo; empty where there is no such file."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith(name)), "")


def device_name(device: torch.device) -> str:
    """The model of the card, or of the processor."""
    module = _module(device.type)
    if module is not None:
        return module.get_device_name(device)
    return _processor_field("model name") or platform.machine()


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: of the card's allocator, or resident for the CPU."""
    module = _module(device.type)
    if module is not None:
        return module.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def default_half_type(device_type: str) -> torch.dtype:
    """The usual short type: bfloat16 on the CPU, whose float16 convolutions are very slow, else float16."""
    return torch.bfloat16 if device_type == "cpu" else torch.float16


def supports_bfloat16(device_type: str) -> bool:
    """Whether it computes in bfloat16 at all; first-generation NPUs and old CUDA cards do not."""
    if device_type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return device_type == "cpu" or _module(device_type).is_bf16_supported()


def has_fast_half(device_type: str, half: torch.dtype) -> bool:
    """Whether a short type is faster than float32: on the CPU only bfloat16, where there are instructions for it."""
    return device_type != "cpu" or (half == torch.bfloat16 and "avx512_bf16" in _processor_field("flags").split())
