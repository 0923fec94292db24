"""A small network in a TrainState and a process group of one, for the tests of several modules."""

import dataclasses
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from image_classification.cli import parse
from image_classification.config import OptimConfig, PrecisionConfig
from image_classification.optim import build_optimizer
from image_classification.precision import make_precision
from image_classification.resnet import build_resnet
from image_classification.training import TrainState
from mmcls.utils.errors import RequestError


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Several threads make networks this small slower, on a busy machine twentyfold."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def make_state() -> Callable[..., TrainState]:
    """Makes a TrainState around a ResNet-18 of an eighth of the width; the same weights each time."""

    def make(
        *,
        precision=PrecisionConfig(),
        schedule=lambda step: 0.05,
        label_smoothing=0.0,
        optim=OptimConfig(),
        device="cpu",
    ) -> TrainState:
        torch.manual_seed(0)
        module = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125).to(device)
        optimizer = build_optimizer(module, optim, schedule(0))
        return TrainState(
            module=module,
            model=module,
            precision=make_precision(precision, module, optimizer, torch.device("cpu")),
            schedule=schedule,
            label_smoothing=label_smoothing,
            seed=0,
            device=torch.device(device),
        )

    return make


@pytest.fixture
def process_group(tmp_path):
    """A gloo group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def values() -> Callable[..., dict]:
    """Every option of a command line by its name, as parsed."""

    def parsed(*argv: str) -> dict:
        config, _ = parse(list(argv))
        return {
            item.name: getattr(section, item.name)
            for section in (getattr(config, field.name) for field in dataclasses.fields(config))
            for item in dataclasses.fields(section)
        }

    return parsed


@pytest.fixture
def refused() -> Callable[..., RequestError]:
    """The error of a command line that is wrong."""

    def error(*argv: str) -> RequestError:
        with pytest.raises(RequestError) as caught:
            parse(list(argv))
        assert caught.value.exit_status == 2
        assert caught.value.remedy
        assert "\n" not in str(caught.value)
        return caught.value

    return error
