"""The levels of mixed precision against each other and against a torch.amp loop by hand, on ResNet-50 for CIFAR.

o1_vs_o0, o2_vs_o0        images/s of a training step, of the level and of O0, all channels-last
o1_vs_handwritten_amp     images/s of our O1 and of bare autocast plus GradScaler: what the house costs
o2_memory_vs_o0           MiB that two training steps add to a fresh process at most: resident on the CPU, of the
                          allocator on a card

python3 benchmarks/precision.py [--pairs 20] [--batch-size 32] [--width-multiplier 1.0] [--device cpu|cuda|npu]
"""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50")]

import torch
import torch.nn.functional as F
import tyro
from common import machine_line, print_claim, time_alternating

from image_classification.config import OptimConfig, PrecisionConfig
from image_classification.optim import build_optimizer
from image_classification.precision import make_precision
from image_classification.resnet import build_resnet
from image_classification.training import TrainState, train_step
from mmcls.utils.device import (
    default_half_type,
    device_name,
    make_grad_scaler,
    peak_memory_bytes,
    set_device,
    synchronize,
)

MIB = 2**20
SPEED = ("o1_vs_o0", "o2_vs_o0", "o1_vs_handwritten_amp")


@dataclass
class Options:
    pairs: int = 20
    batch_size: int = 32
    width_multiplier: float = 1.0
    threads: int = 2
    device: Literal["cpu", "cuda", "npu"] = "cpu"
    claims: tuple[str, ...] = (*SPEED, "o2_memory_vs_o0")
    memory_of: str | None = None
    """For the processes that this one starts: print the memory that two steps of this level take, and stop."""


def network(options: Options, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    model = build_resnet("resnet50", 10, stem="cifar", width_multiplier=options.width_multiplier)
    return model.to(device, memory_format=torch.channels_last).train()


def batch(options: Options, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    images = torch.randn(options.batch_size, 3, 32, 32).to(device, memory_format=torch.channels_last)
    return images, torch.randint(10, (options.batch_size,)).to(device)


def our_step(level: str, options: Options, device: torch.device) -> Callable[[], None]:
    """One call is one step of ours, until the device has done it."""
    model = network(options, device)
    optimizer = build_optimizer(model, OptimConfig(), lr=0.01)
    state = TrainState(
        module=model,
        model=model,
        precision=make_precision(PrecisionConfig(opt_level=level, amp_engine="torch"), model, optimizer, device),
        schedule=lambda step: 0.01,
        label_smoothing=0.0,
        seed=0,
        device=device,
    )
    group = [batch(options, device)]

    def step() -> None:
        train_step(state, group)
        synchronize(device)

    return step


def handwritten_amp_step(options: Options, device: torch.device) -> Callable[[], None]:
    """One call is one step of the loop of torch's documentation: autocast, GradScaler, torch's SGD."""
    model, half = network(options, device), default_half_type(device.type)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scaler = make_grad_scaler(device, 2.0**16, enabled=half == torch.float16)
    images, labels = batch(options, device)

    def step() -> None:
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype=half):
            loss = F.cross_entropy(model(images), labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        synchronize(device)

    return step


def memory_of_two_steps(level: str, options: Options, device: torch.device) -> float:
    """MiB at the peak, above what the process held before it had a network."""
    before = peak_memory_bytes(device)
    step = our_step(level, options, device)
    for _ in range(2):  # the momentum is there from the second on
        step()
    return (peak_memory_bytes(device) - before) / MIB


def memory_in_a_process_of_its_own(level: str, options: Options) -> float:
    flags = {
        "memory-of": level,
        "batch-size": options.batch_size,
        "width-multiplier": options.width_multiplier,
        "threads": options.threads,
        "device": options.device,
    }
    command = [sys.executable, __file__, *(f"--{name}={value}" for name, value in flags.items())]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    device = set_device(options.device, 0)
    if options.memory_of:
        print(memory_of_two_steps(options.memory_of, options, device))
        return
    print(machine_line() if device.type == "cpu" else f"{device_name(device)}, torch {torch.__version__}")
    print(f"batch {options.batch_size} at 32x32, width {options.width_multiplier:g}, {options.pairs} pairs")
    o0, o1, o2 = ((lambda level=level: our_step(level, options, device)) for level in ("O0", "O1", "O2"))
    compared = {"o1_vs_o0": (o1, o0), "o2_vs_o0": (o2, o0),
                "o1_vs_handwritten_amp": (o1, lambda: handwritten_amp_step(options, device))}  # fmt: skip
    for name in (name for name in SPEED if name in options.claims):
        ours, peer = (make() for make in compared[name])
        times = time_alternating(ours, peer, num_pairs=options.pairs, num_warmup=1)
        print_claim(name, *times.per_second(options.batch_size), times.speedup)
    if "o2_memory_vs_o0" in options.claims:
        ours, peer = (memory_in_a_process_of_its_own(level, options) for level in ("O2", "O0"))
        print_claim("o2_memory_vs_o0", ours, peer, ours / peer)


if __name__ == "__main__":
    main(tyro.cli(Options))
