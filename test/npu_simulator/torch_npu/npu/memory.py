"""Memory statistics; there is no cache, so that reserved is allocated."""

import torch

from torch_npu.npu.utils import _get_device_index


def _index(device):
    torch.npu._lazy_init()
    return _get_device_index(device, optional=True)


def memory_stats(device=None):
    return torch.accelerator.memory_stats(_index(device))


def memory_allocated(device=None):
    return torch.accelerator.memory_allocated(_index(device))


def max_memory_allocated(device=None):
    return torch.accelerator.max_memory_allocated(_index(device))


def memory_reserved(device=None):
    return torch.accelerator.memory_reserved(_index(device))


def max_memory_reserved(device=None):
    return torch.accelerator.max_memory_reserved(_index(device))


def reset_peak_memory_stats(device=None):
    torch.accelerator.reset_peak_memory_stats(_index(device))


def reset_max_memory_allocated(device=None):
    reset_peak_memory_stats(device)


def reset_accumulated_memory_stats(device=None):
    torch.accelerator.reset_accumulated_memory_stats(_index(device))


def mem_get_info(device=None):
    """Free and total bytes."""
    return torch.accelerator.get_memory_info(_index(device))


def memory_summary(device=None, abbreviated=False):
    return f"NPU {_index(device)} (simulated): {memory_allocated(device)} bytes, peak {max_memory_allocated(device)}"


def empty_cache():
    torch.accelerator.empty_cache()


def set_per_process_memory_fraction(fraction, device=None) -> None:
    """Accepted; NPU_SIMULATOR_MEMORY_MB is what limits memory here."""
    if not 0 <= fraction <= 1:
        raise ValueError(f"Invalid fraction value: {fraction}. Allowed range: 0~1")
