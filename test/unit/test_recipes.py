"""The recipes against the numbers that were published for them."""

import pytest

from image_classification.config import resolve
from image_classification.recipes import recipe
from image_classification.schedule import make_schedule


def test_imagenet_full_is_the_model_card():
    config = recipe("full", "folder", small_images=False)
    plan = resolve(config, 16, 1_281_167, 50_000)
    assert config.data.batch_size == 256
    assert (plan.global_batch_size, plan.peak_lr, plan.warmup_epochs, plan.epochs) == (4096, pytest.approx(1.6), 8, 90)
    assert config.schedule.schedule == "cosine"
    optim = config.optim
    assert (optim.label_smoothing, optim.momentum, optim.weight_decay, optim.nesterov) == (0.1, 0.9, 1e-4, False)
    assert config.precision.opt_level == "O0"


@pytest.mark.parametrize("kind", ["cifar10", "cifar100", "folder"])
def test_cifar_full_is_the_published_run(kind):
    config = recipe("full", kind, small_images=True)
    plan = resolve(config, 8, 50_000, 10_000)
    assert plan.batch_line == "global batch 128 = 8 ranks x 16 x 1 accumulation"
    assert (plan.peak_lr, plan.warmup_epochs, plan.epochs) == (pytest.approx(0.1), 0, 200)
    optim = config.optim
    assert (optim.label_smoothing, optim.momentum, optim.weight_decay) == (0.0, 0.9, 5e-4)
    steps = plan.steps_per_epoch
    schedule = make_schedule(config.schedule, plan.peak_lr, steps, plan.total_steps, warmup_epochs=plan.warmup_epochs)
    rates = [schedule(epoch * steps) for epoch in (0, 59, 60, 119, 120, 159, 160, 199)]
    assert rates == pytest.approx([0.1, 0.1, 0.02, 0.02, 0.004, 0.004, 0.0008, 0.0008])


@pytest.mark.parametrize(
    ("kind", "small"), [("digits", True), ("cifar10", True), ("folder", False), ("synthetic", False)]
)
def test_performance_is_full_in_mixed_precision_and_two_epochs(kind, small):
    full, performance = recipe("full", kind, small), recipe("performance", kind, small)
    assert (full.precision.opt_level, full.run.recipe) == ("O0", "full")
    assert (performance.precision.opt_level, performance.run.recipe) == ("auto", "performance")
    assert performance.schedule.epochs == 2 < full.schedule.epochs
    assert (performance.model, performance.data, performance.optim) == (full.model, full.data, full.optim)


def test_synthetic_images_are_trained_as_imagenet():
    assert recipe("full", "synthetic", False) == recipe("full", "folder", False)


def test_the_quickstart_is_cheap():
    config = recipe("full", "digits", small_images=True)
    plan = resolve(config, 8, 1437, 360)
    assert (plan.global_batch_size, plan.steps_per_epoch) == (128, 11)
    assert plan.total_steps == 176
