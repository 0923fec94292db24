"""The derived numbers of a run, and the sections they come from."""

import dataclasses
import json

import pytest

from image_classification.config import (
    DataConfig,
    ModelConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    resolve,
    to_plain,
)
from image_classification.recipes import CIFAR_FULL
from mmcls.utils.errors import RequestError


def plan_of(world_size=1, num_train_images=1000, *, batch_size=10, run=RunConfig(), optim=OptimConfig(), **schedule):
    config = TrainConfig(
        data=DataConfig(batch_size=batch_size), optim=optim, schedule=ScheduleConfig(**schedule), run=run
    )
    return resolve(config, world_size, num_train_images, 100)


def test_the_global_batch_is_the_product():
    plan = plan_of(8, 50_000, batch_size=16)
    assert (plan.micro_batch_size, plan.rank_batch_size, plan.global_batch_size) == (16, 16, 128)
    assert plan.batch_line == "global batch 128 = 8 ranks x 16 x 1 accumulation"


def test_accumulation_multiplies_the_batch_of_a_rank():
    plan = plan_of(2, 1000, batch_size=3, accumulation_steps=4)
    assert (plan.micro_batch_size, plan.rank_batch_size, plan.global_batch_size) == (3, 12, 24)
    assert plan.batch_line == "global batch 24 = 2 ranks x 3 x 4 accumulation"


@pytest.mark.parametrize(
    ("num_images", "world_size", "batch_size", "steps", "left_out"),
    [(100, 1, 10, 10, 0), (100, 1, 33, 3, 1), (100, 3, 11, 3, 1), (24, 2, 7, 1, 10), (24, 8, 3, 1, 0)],
)
def test_images_that_fill_no_batch_are_left_out_and_counted(num_images, world_size, batch_size, steps, left_out):
    plan = plan_of(world_size, num_images, batch_size=batch_size)
    assert (plan.steps_per_epoch, plan.left_out_images) == (steps, left_out)
    assert plan.steps_per_epoch * plan.global_batch_size + plan.left_out_images == num_images
    assert (plan.num_train_images, plan.num_val_images) == (num_images, 100)


def test_steps_are_limited_by_epochs_and_by_max_steps():
    assert plan_of(epochs=3).total_steps == 300
    assert plan_of(epochs=3, max_steps=7).total_steps == 7
    assert plan_of(epochs=3, max_steps=1000).total_steps == 300
    assert plan_of(epochs=3, max_steps=7).epochs == 3


def test_epochs_without_augmentation_are_part_of_the_plan():
    config = TrainConfig(data=DataConfig(batch_size=10, no_augment_epochs=4))
    assert resolve(config, 1, 1000, 100).no_augment_epochs == 4
    assert plan_of().no_augment_epochs == 0


def test_too_few_images_are_a_wrong_request_that_names_the_numbers():
    with pytest.raises(RequestError) as caught:
        plan_of(8, 24, batch_size=8)
    assert caught.value.subject == "--batch_size=8"
    assert "24 training images" in caught.value.problem and "64" in caught.value.problem
    assert caught.value.remedy


def test_validating_needs_no_full_batch():
    plan = plan_of(8, 24, batch_size=8, run=RunConfig(evaluate=True))
    assert (plan.steps_per_epoch, plan.total_steps) == (0, 0)


def test_the_learning_rate_follows_the_global_batch_unless_it_is_given():
    assert plan_of(8, 10_000, batch_size=512).peak_lr == pytest.approx(1.6)
    assert plan_of(1, 10_000, batch_size=256).peak_lr == pytest.approx(0.1)
    assert plan_of(2, 10_000, batch_size=32, accumulation_steps=4).peak_lr == pytest.approx(0.1)
    assert plan_of(8, 10_000, batch_size=512, optim=OptimConfig(lr=0.3)).peak_lr == 0.3
    assert plan_of(8, 10_000, batch_size=512, optim=OptimConfig(lr=0.0)).peak_lr == 0.0


@pytest.mark.parametrize(
    ("world_size", "batch_size", "peak_lr", "warmup"),
    [(8, 16, 0.1, 0), (8, 32, 0.2, 0), (8, 64, 0.4, 5), (1, 16, 0.0125, 0), (8, 256, 1.6, 5)],
)
def test_cifar_warms_up_only_above_a_learning_rate(world_size, batch_size, peak_lr, warmup):
    config = dataclasses.replace(CIFAR_FULL, data=DataConfig(batch_size=batch_size))
    plan = resolve(config, world_size, 50_000, 10_000)
    assert (plan.peak_lr, plan.warmup_epochs) == (pytest.approx(peak_lr), warmup)


def test_a_warmup_that_is_given_counts_whatever_the_recipe_says():
    assert plan_of(warmup=2.0).warmup_epochs == 2.0
    assert plan_of(warmup=2.0, recipe_warmup=5.0, recipe_warmup_above_lr=9.0).warmup_epochs == 2.0
    assert plan_of(warmup=0.0, recipe_warmup=5.0).warmup_epochs == 0.0
    assert plan_of(recipe_warmup=5.0).warmup_epochs == 5.0
    assert plan_of(recipe_warmup=5.0, optim=OptimConfig(lr=0.5), recipe_warmup_above_lr=0.5).warmup_epochs == 0.0


def test_sections_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TrainConfig().data.batch_size = 1


def test_option_names_are_unique_over_the_sections():
    names = [
        item.name for section in dataclasses.fields(TrainConfig) for item in dataclasses.fields(section.default_factory)
    ]
    assert len(names) == len(set(names))


def test_every_technique_is_off_unless_asked_for():
    config = TrainConfig()
    assert (config.data.mixup, config.data.cutmix, config.data.no_augment_epochs) == (0, 0, 0)
    assert (config.optim.ema_decay, config.optim.clip_grad_norm, config.optim.optimizer) == (None, None, "sgd")
    assert (config.model.freeze, config.model.fine_tuning) == ((), False)
    assert config.precision == PrecisionConfig(opt_level="O0")


def test_plain_values_survive_json():
    plain = to_plain(CIFAR_FULL)
    assert json.loads(json.dumps(plain)) == plain
    assert plain["schedule"]["milestones"] == [60, 120, 160]
    assert plain["data"] == dataclasses.asdict(CIFAR_FULL.data)
    assert to_plain(TrainConfig(model=ModelConfig(freeze=("conv1", "bn1"))))["model"]["freeze"] == ["conv1", "bn1"]
    assert to_plain(plan_of())["total_steps"] == plan_of().total_steps
