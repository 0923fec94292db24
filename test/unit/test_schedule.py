from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_classification.config import ScheduleConfig
from image_classification.schedule import make_schedule


def schedule_of(steps_per_epoch=10, peak_lr=0.1, warmup=0.0, **fields):
    config = ScheduleConfig(**fields)
    return make_schedule(config, peak_lr, steps_per_epoch, steps_per_epoch * config.epochs, warmup_epochs=warmup)


@pytest.mark.parametrize("steps_per_epoch", [1, 10])
@pytest.mark.parametrize(
    ("epoch", "lr"), [(0, 0.1), (29, 0.1), (30, 0.01), (45, 0.01), (59, 0.01), (60, 0.001), (80, 0.0001), (89, 0.0001)]
)
def test_step_values(epoch, lr, steps_per_epoch):
    schedule = schedule_of(steps_per_epoch, schedule="step", milestones=(30, 60, 80), gamma=0.1)
    assert schedule(epoch * steps_per_epoch) == pytest.approx(lr)
    assert schedule((epoch + 1) * steps_per_epoch - 1) == pytest.approx(lr)


def test_step_values_of_the_cifar_recipe():
    schedule = schedule_of(7, schedule="step", epochs=200, milestones=(60, 120, 160), gamma=0.2)
    assert [schedule(7 * epoch) for epoch in (59, 60, 120, 160)] == pytest.approx([0.1, 0.02, 0.004, 0.0008])


@pytest.mark.parametrize(("epochs", "lr"), [(90, 0.075), (120, 0.0853553391)])
def test_cosine_at_epoch_30(epochs, lr):
    assert schedule_of(schedule="cosine", epochs=epochs)(300) == pytest.approx(lr)


@pytest.mark.parametrize(("shape", "power"), [("cosine", 2), ("linear", 2), ("polynomial", 1), ("polynomial", 3)])
def test_decay_starts_at_the_end_of_the_warm_up_and_reaches_zero_after_the_last_step(shape, power):
    schedule = schedule_of(10, schedule=shape, epochs=10, warmup=2, power=power)
    lrs = [schedule(step) for step in range(20, 100)]
    assert lrs[0] == pytest.approx(0.1)
    assert lrs[40] == pytest.approx(0.1 * 0.5**power if shape == "polynomial" else 0.05)
    assert all(a > b > 0 for a, b in pairwise(lrs))
    assert lrs[-1] < 0.1 / 80 + 1e-9
    assert schedule(100) == pytest.approx(0) and schedule(1000) == pytest.approx(0)


def test_linear_values():
    schedule = schedule_of(10, schedule="linear", epochs=10)
    assert [schedule(step) for step in (0, 25, 50, 99)] == pytest.approx([0.1, 0.075, 0.05, 0.001])


def test_polynomial_values():
    schedule = schedule_of(10, schedule="polynomial", epochs=10, power=2.0)
    assert [schedule(step) for step in (0, 25, 50, 99)] == pytest.approx([0.1, 0.05625, 0.025, 0.00001])


@given(
    step=st.integers(0, 400),
    steps_per_epoch=st.integers(1, 20),
    epochs=st.integers(1, 20),
    warmup=st.floats(0, 25),
    power=st.floats(0.5, 4),
)
def test_polynomial_of_power_one_is_linear_and_higher_powers_lie_below(step, steps_per_epoch, epochs, warmup, power):
    linear = schedule_of(steps_per_epoch, schedule="linear", epochs=epochs, warmup=warmup)(step)
    fields = {"schedule": "polynomial", "epochs": epochs, "warmup": warmup}
    assert schedule_of(steps_per_epoch, power=1.0, **fields)(step) == linear
    lr = schedule_of(steps_per_epoch, power=power, **fields)(step)
    assert lr >= linear if step < round(warmup * steps_per_epoch) or power <= 1 else lr <= linear


@pytest.mark.parametrize("shape", ["step", "cosine", "linear", "polynomial"])
@pytest.mark.parametrize("warmup", [0.3, 2, 2.5])
def test_warm_up_is_linear_and_rises_to_the_peak(shape, warmup):
    schedule = schedule_of(10, peak_lr=1.6, schedule=shape, warmup=warmup, milestones=(5,))
    num_steps = round(10 * warmup)
    lrs = [schedule(step) for step in range(num_steps)]
    assert lrs == pytest.approx([1.6 * (step + 1) / num_steps for step in range(num_steps)])
    assert all(a < b for a, b in pairwise(lrs))
    assert lrs[-1] == schedule(num_steps) == 1.6


def test_warm_up_of_the_whole_run():
    schedule = schedule_of(4, schedule="cosine", epochs=2, warmup=2)
    # Step 8 is never taken, but a log line after the last step may ask for it.
    assert [schedule(step) for step in (0, 7, 8)] == pytest.approx([0.0125, 0.1, 0.1])


def test_max_steps_does_not_bend_the_schedule():
    whole, cut = schedule_of(epochs=90), schedule_of(epochs=90, max_steps=5)
    assert [cut(step) for step in range(5)] == [whole(step) for step in range(5)]


@pytest.mark.parametrize("warmup", [0, 0.5, 3, 30])
@pytest.mark.parametrize("steps_per_epoch", [1, 7])
@pytest.mark.parametrize("epochs", [1, 3, 20])
@pytest.mark.parametrize("shape", ["step", "cosine", "linear", "polynomial"])
def test_is_a_pure_function_between_zero_and_the_peak(shape, epochs, steps_per_epoch, warmup):
    fields = {"schedule": shape, "epochs": epochs, "warmup": warmup, "milestones": (2, 5)}
    steps = range(epochs * steps_per_epoch)
    straight, resumed = schedule_of(steps_per_epoch, **fields), schedule_of(steps_per_epoch, **fields)
    lrs = [straight(step) for step in steps]
    assert [resumed(step) for step in reversed(steps)] == lrs[::-1]
    assert all(0 < lr <= 0.1 for lr in lrs)
