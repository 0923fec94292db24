"""Our training step against the plain loop that anybody would write, on ResNet-50 with CIFAR-size images.

Two claims, each images/s of ours, of the peer, and the median ratio over alternating pairs:

    train_step_same_settings   O0, NCHW, as the peer: what the house costs
    train_step_defaults        the memory format and precision that `--recipe=performance` takes on this machine

    python3 benchmarks/train_step.py [--pairs 20] [--batch-size 32] [--threads 2]
"""

import sys
from dataclasses import dataclass
from pathlib import Path

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
from mmcls.utils.device import has_fast_half

CPU = torch.device("cpu")


@dataclass
class Options:
    pairs: int = 20
    batch_size: int = 32
    threads: int = 2


def our_step(images, labels, opt_level: str, memory_format: torch.memory_format):
    """One call is one step of ours on a network of its own."""
    torch.manual_seed(0)
    model = build_resnet("resnet50", 10, stem="cifar").to(memory_format=memory_format).train()
    optimizer = build_optimizer(model, OptimConfig(), lr=0.01)
    state = TrainState(
        module=model,
        model=model,
        precision=make_precision(PrecisionConfig(opt_level=opt_level), model, optimizer, CPU),
        schedule=lambda step: 0.01,
        label_smoothing=0.0,
        seed=0,
        device=CPU,
    )
    images = images.to(memory_format=memory_format)
    return lambda: train_step(state, [(images, labels)])


def plain_step(images, labels):
    """One call is one step of the plain loop: float32, NCHW, torch's SGD."""
    torch.manual_seed(0)
    model = build_resnet("resnet50", 10, stem="cifar").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)

    def step():
        optimizer.zero_grad()
        logits = model(images)
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        optimizer.step()

    return step


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    images = torch.randn(options.batch_size, 3, 32, 32)
    labels = torch.randint(10, (options.batch_size,))
    level = "O1" if has_fast_half("cpu", torch.bfloat16) else "O0"
    print(machine_line())
    print(f"batch {options.batch_size} at 32x32, {options.pairs} pairs; defaults here: {level}, channels-last")
    claims = {
        "train_step_same_settings": our_step(images, labels, "O0", torch.contiguous_format),
        "train_step_defaults": our_step(images, labels, level, torch.channels_last),
    }
    for name, ours in claims.items():
        times = time_alternating(ours, plain_step(images, labels), num_pairs=options.pairs)
        print_claim(name, *times.per_second(options.batch_size), times.speedup)


if __name__ == "__main__":
    main(tyro.cli(Options))
