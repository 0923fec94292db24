"""The loss scale and what makes it fall."""

import torch
import torch.distributed as dist


class LossScaler:
    """A scale that is fixed, or dynamic: halved at an overflow, doubled after 2000 steps without.

    Chips that saturate have no infinity to look for, but a flag; the ranks agree on it, if they were connected
    when the scaler was made. On the others it is the summed gradients that tell every rank.
    """

    def __init__(self, loss_scale, minimum, maximum, device_type):
        self.dynamic = loss_scale == "dynamic"
        self.loss_scale = min(2.0**16, maximum) if self.dynamic else loss_scale
        self.unskipped = 0
        self._minimum, self._maximum = minimum or 0.0, maximum
        self._has_flag = self.dynamic and device_type == "npu" and not torch.npu.utils.is_support_inf_nan()
        self.looks_for_infinity = self.dynamic and not self._has_flag
        self._is_distributed = dist.is_initialized()

    def clear_flag(self):
        if self._has_flag:
            torch.npu.clear_npu_overflow_flag()

    def read_flag(self):
        if not self._has_flag:
            return False
        overflows = torch.tensor([float(torch.npu.get_npu_overflow_flag())], device="npu")
        if self._is_distributed:
            dist.all_reduce(overflows)
        return overflows.item() > 0

    def update(self, overflow):
        self.unskipped += 1
        if self.dynamic and overflow:
            self.loss_scale = max(self.loss_scale / 2, self._minimum)
            self.unskipped = 0
        elif self.dynamic and self.unskipped == 2000:
            self.loss_scale = min(self.loss_scale * 2, self._maximum)
            self.unskipped = 0
