"""`torch.npu.amp.autocast`."""

import torch


class autocast(torch.amp.autocast_mode.autocast):
    """`torch.autocast("npu", ...)` with float16 by default."""

    def __init__(self, enabled: bool = True, dtype: torch.dtype = torch.float16, cache_enabled: bool = True):
        super().__init__("npu", enabled=enabled, dtype=dtype, cache_enabled=cache_enabled)
