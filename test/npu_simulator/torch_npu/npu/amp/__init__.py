"""Mixed precision under its Ascend names."""

from torch_npu.npu.amp.autocast_mode import autocast
from torch_npu.npu.amp.grad_scaler import GradScaler

__all__ = ["autocast", "GradScaler"]
