"""Random numbers: a generator for each card. Their values are the CPU's, not Ascend's."""

import torch

from torch_npu import _C
from torch_npu.npu.utils import _get_device_index

default_generators = tuple(_C.default_generator(index) for index in range(_C.device_count()))


def _current():
    torch.npu._lazy_init()
    return default_generators[_C.current_device()]


def _of(device):
    torch.npu._lazy_init()
    return default_generators[_get_device_index(device, optional=True)]


def manual_seed(seed):
    _current().manual_seed(int(seed))


def manual_seed_all(seed):
    for generator in default_generators:
        generator.manual_seed(int(seed))


def seed():
    _current().seed()


def seed_all():
    manual_seed_all(_current().seed())


def initial_seed():
    return _current().initial_seed()


def get_rng_state(device: int | str | torch.device = "npu") -> torch.Tensor:
    return _of(device).get_state()


def set_rng_state(new_state: torch.Tensor, device: int | str | torch.device = "npu") -> None:
    _of(device).set_state(new_state)


def get_rng_state_all():
    return [generator.get_state() for generator in default_generators]


def set_rng_state_all(new_states):
    for generator, state in zip(default_generators, new_states, strict=True):
        generator.set_state(state)
