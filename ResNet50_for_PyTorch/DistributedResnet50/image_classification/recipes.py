"""The recipes as typed constants: what `--recipe` means for each kind of data.

Sources of the numbers: Goyal et al. 2017 (learning rate 0.1 per 256 images, linear scaling, warm-up); the Ascend
ModelZoo model card of ResNet-50 (8 x 512 images, lr 1.6, 8 warm-up epochs, cosine, label smoothing 0.1: 76.70 %
top-1 on ImageNet); weiaicunzai's pytorch-cifar100 (batch 128, lr 0.1, steps at 60/120/160 by 0.2: 80.0 % on
CIFAR-100 and 95.5 % on CIFAR-10 with this network).
"""

from dataclasses import replace
from typing import Literal

from image_classification.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
)

RecipeName = Literal["full", "performance"]

IMAGENET_FULL = TrainConfig(
    data=DataConfig(batch_size=256),
    optim=OptimConfig(lr_per_256=0.1, momentum=0.9, weight_decay=1e-4, label_smoothing=0.1),
    schedule=ScheduleConfig(epochs=90, schedule="cosine", recipe_warmup=8.0),
)

CIFAR_FULL = TrainConfig(
    data=DataConfig(batch_size=16),
    optim=OptimConfig(lr_per_256=0.2, momentum=0.9, weight_decay=5e-4),
    schedule=ScheduleConfig(
        epochs=200,
        schedule="step",
        milestones=(60, 120, 160),
        gamma=0.2,
        recipe_warmup=5.0,
        recipe_warmup_above_lr=0.2,
    ),
)

# 1,437 images are few updates: a start at the identity (Goyal et al. 2017, section 5.1) makes the most of them.
DIGITS_FULL = TrainConfig(
    model=ModelConfig(zero_init_last_norm=True),
    data=DataConfig(batch_size=16),
    optim=OptimConfig(lr_per_256=0.2, momentum=0.9, weight_decay=1e-4),
    schedule=ScheduleConfig(epochs=16, schedule="cosine", recipe_warmup=1.0),
)


def recipe(name: RecipeName, kind: str, small_images: bool) -> TrainConfig:
    """The recipe `name` for data of `kind` (a kind of `image_classification.data`).

    `performance` is `full` with two epochs, in mixed precision where that is faster.
    """
    if kind == "digits":
        full = DIGITS_FULL
    elif small_images:
        full = CIFAR_FULL
    else:
        full = IMAGENET_FULL
    if name == "full":
        return full
    return replace(
        full,
        schedule=replace(full.schedule, epochs=2),
        precision=PrecisionConfig(opt_level="auto"),
        run=RunConfig(recipe="performance"),
    )
