"""Operators that PyTorch does not have: storage formats and the overflow flag as a tensor."""

import torch

from torch_npu import _C


def npu_format_cast(self: torch.Tensor, acl_format: int) -> torch.Tensor:
    """A copy that says it has another storage format; its values and strides are those of `self`."""
    cast = self.clone()
    cast._npu_format = int(acl_format)
    return cast


def get_npu_format(self: torch.Tensor) -> int:
    """0 for NCHW (four dimensions), 2 for ND, or what `npu_format_cast` was asked for."""
    return getattr(self, "_npu_format", 0 if self.dim() == 4 else 2)


def npu_get_float_status(input: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """Eight float32 numbers on the device; the first is not zero after an overflow."""
    status = torch.zeros_like(input)
    status[0] = float(_C.read_overflow_flag(input.device.index))
    return status


def npu_clear_float_status(input: torch.Tensor, mode: int = 0) -> torch.Tensor:
    """Clears the overflow flag of the device that `input` is on."""
    _C.clear_overflow_flag(input.device.index)
    return torch.zeros_like(input)
