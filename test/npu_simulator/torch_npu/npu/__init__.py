"""`torch.npu`: names and signatures are those of torch_npu 2.12."""
# ruff: noqa: F401, F811 (names are given on, and `device` is both a class and an argument)

import os

import torch

from torch_npu import _C
from torch_npu.npu import amp, utils
from torch_npu.npu.memory import (
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    mem_get_info,
    memory_allocated,
    memory_reserved,
    memory_stats,
    memory_summary,
    reset_accumulated_memory_stats,
    reset_max_memory_allocated,
    reset_peak_memory_stats,
    set_per_process_memory_fraction,
)
from torch_npu.npu.npu_config import config, conv, is_jit_compile_false, matmul, set_compile_mode, set_option
from torch_npu.npu.random import (
    default_generators,
    get_rng_state,
    get_rng_state_all,
    initial_seed,
    manual_seed,
    manual_seed_all,
    seed,
    seed_all,
    set_rng_state,
    set_rng_state_all,
)
from torch_npu.npu.streams import (
    Event,
    Stream,
    StreamContext,
    current_stream,
    default_stream,
    set_stream,
    stream,
)
from torch_npu.npu.utils import (
    clear_npu_overflow_flag,
    current_device,
    device,
    device_of,
    get_npu_overflow_flag,
    is_bf16_supported,
    set_device,
    synchronize,
)

_get_device_index = utils._get_device_index
_initialized = False


def _lazy_init():
    global _initialized
    if _is_in_bad_fork() or not _initialized:
        _C.start_device()
        _initialized = True


def init():
    """Starts the device; done by itself at first use."""
    _lazy_init()


def is_initialized():
    return _initialized and not _is_in_bad_fork()


def _is_in_bad_fork():
    return _C.in_bad_fork()


def is_available():
    return device_count() > 0


def device_count() -> int:
    return _C.device_count()


def _checked_index(device):
    index = utils._get_device_index(device, optional=True)
    if index < 0 or index >= device_count():
        raise AssertionError("Invalid device id")
    return index


def get_device_name(device_name=None):
    _checked_index(device_name)
    return _C.soc_name()


class _DeviceProperties:
    def __init__(self, index):
        self.name = _C.soc_name()
        self.total_memory = torch.accelerator.get_memory_info(index)[1]
        self.L2_cache_size = 192 << 20
        self.cube_core_num, self.vector_core_num = (32, 32) if _C.saturates() else (20, 40)

    def __repr__(self):
        return f"_NPUDeviceProperties(name='{self.name}', total_memory={self.total_memory >> 20}MB, simulated)"


def get_device_properties(device_name=None):
    index = _checked_index(device_name)
    _lazy_init()
    return _DeviceProperties(index)


def get_device_capability(device=None):
    """None, as on the real device, unless TORCH_NPU_DEVICE_CAPABILITY says `major.minor`."""
    text = os.environ.get("TORCH_NPU_DEVICE_CAPABILITY")
    return tuple(int(part) for part in text.split(".")) if text else None


def get_amp_supported_dtype():
    return [torch.float16, torch.bfloat16, torch.float32] if is_bf16_supported() else [torch.float16, torch.float32]


def is_autocast_enabled():
    return torch.is_autocast_enabled("npu")


def set_autocast_enabled(enable):
    torch.set_autocast_enabled("npu", enable)


def get_autocast_dtype():
    return torch.get_autocast_dtype("npu")


def set_autocast_dtype(dtype):
    torch.set_autocast_dtype("npu", dtype)
