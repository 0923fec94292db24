"""Devices and the overflow flag."""

import warnings
from typing import Any

import torch
from torch._utils import _get_device_index as _torch_get_device_index

from torch_npu import _C
from torch_npu._operators import npu_clear_float_status, npu_get_float_status


def _lazy_init():
    torch.npu._lazy_init()


def synchronize(device=None):
    """Waits for all kernels on a device, by default the current one."""
    _lazy_init()
    torch.accelerator.synchronize(_get_device_index(device, optional=True))


def set_device(device):
    index = _get_device_index(device, optional=True)
    if index >= 0:
        _lazy_init()
        _C.set_device(index)


def current_device():
    _lazy_init()
    return _C.current_device()


def _get_device_index(device: Any, optional: bool = False, allow_cpu: bool = False) -> int:
    """The index in a number, string or torch.device; the current device for None, where that is allowed."""
    if isinstance(device, int):
        return device
    if isinstance(device, str):
        device = torch.device(device)
    if isinstance(device, torch.device) and device.type != "npu" and not (allow_cpu and device.type == "cpu"):
        raise ValueError(f"Expected a npu device, but got: {device}")
    return _torch_get_device_index(device, optional, allow_cpu)


class device:
    """Selects a device for a `with` block; none for a negative index."""

    def __init__(self, device):
        self.idx = _get_device_index(device, optional=True)
        self.prev_idx = -1

    def __enter__(self):
        if self.idx >= 0:
            _lazy_init()
            self.prev_idx = _C.set_device(self.idx)

    def __exit__(self, *args):
        if self.idx >= 0:
            _C.set_device(self.prev_idx)
        return False


class device_of(device):
    """Selects the device of a tensor or storage for a `with` block."""

    def __init__(self, obj):
        super().__init__(obj.get_device() if obj.is_npu else -1)


def is_support_inf_nan():
    """Whether half precision has inf and NaN; where not, it saturates and sets a flag."""
    _lazy_init()
    return not _C.saturates()


def is_bf16_supported(including_emulation: bool = False):
    _lazy_init()
    return _C.has_bfloat16()


def get_npu_overflow_flag():
    """Whether something has overflowed since the flag was cleared; on chips that saturate.

    Raises:
        RuntimeError: the chip has inf and NaN, and no flag.
    """
    if is_support_inf_nan():
        raise RuntimeError("Unsupported api when soc_version >= Ascend910B1, please use npu_check_overflow")
    return bool(npu_get_float_status(torch.zeros(8).npu()).cpu()[0] != 0)


def clear_npu_overflow_flag():
    if is_support_inf_nan():
        text = "When soc_version >= Ascend910B1, clear_npu_overflow_flag is useless, please remove it."
        warnings.warn(text, stacklevel=2)
        return
    npu_clear_float_status(torch.zeros(8).npu())


def npu_check_overflow(grad):
    """Whether there was an overflow: by the flag, which is cleared, or by inf and NaN in `grad` (tensor or float)."""
    if not is_support_inf_nan():
        overflow = get_npu_overflow_flag()
        if overflow:
            clear_npu_overflow_flag()
        return overflow
    if not isinstance(grad, (float, torch.Tensor)):
        raise RuntimeError("Unsupported type.")
    return not torch.isfinite(torch.as_tensor(grad).float().sum()).item()
