"""Optimizers that work on one buffer for all parameters."""

from torch_npu.optim.npu_fused_sgd import NpuFusedSGD

__all__ = ["NpuFusedSGD"]
