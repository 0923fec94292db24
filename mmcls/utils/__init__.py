"""Devices, ranks and errors, under the names that mmclassification users know."""

from mmcls.utils.device import auto_select_device
from mmcls.utils.distribution import wrap_distributed_model, wrap_non_distributed_model

__all__ = ["auto_select_device", "wrap_distributed_model", "wrap_non_distributed_model"]
