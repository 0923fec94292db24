import pytest

from image_classification.throughput import ThroughputMeter


class Machine:
    """A clock that a test moves, and a device that counts how often it was waited for."""

    def __init__(self):
        self.now, self.synchronisations = 100.0, 0

    def synchronize(self):
        self.synchronisations += 1

    def meter(self, warmup_steps):
        return ThroughputMeter(self.synchronize, warmup_steps, clock=lambda: self.now)

    def steps(self, meter, durations, num_images=16):
        for seconds in durations:
            self.now += seconds
            meter.step_done(num_images)


@pytest.fixture
def machine():
    return Machine()


def test_the_warmup_is_left_out(machine):
    meter = machine.meter(2)
    machine.steps(meter, [30.0, 5.0, 0.5, 0.5, 0.5, 0.5])
    assert meter.pause() == pytest.approx(16 / 0.5)
    assert (meter.images, meter.seconds) == (64, pytest.approx(2.0))


def test_rate_times_seconds_equals_images(machine):
    meter = machine.meter(1)
    for epoch in range(3):
        machine.steps(meter, [0.3 + 0.1 * epoch, 0.7, 0.11, 0.9], num_images=24)
        meter.pause()
        machine.now += 50.0
    assert meter.images == 3 * 3 * 24
    assert meter.images_per_second * meter.seconds == pytest.approx(meter.images)


def test_the_gap_between_epochs_is_left_out(machine):
    meter = machine.meter(1)
    machine.steps(meter, [1.0, 1.0, 1.0])
    assert meter.pause() == pytest.approx(16.0)
    machine.now += 600.0
    machine.steps(meter, [77.0, 1.0, 1.0])
    assert meter.pause() == pytest.approx(16.0)
    assert meter.images_per_second == pytest.approx(16.0)
    assert (meter.images, meter.seconds) == (64, pytest.approx(4.0))


def test_the_warmup_may_be_longer_than_an_epoch(machine):
    meter = machine.meter(5)
    machine.steps(meter, [9.0, 9.0, 9.0])
    assert meter.pause() is None
    machine.steps(meter, [9.0, 9.0, 2.0, 2.0])
    assert meter.pause() == pytest.approx(8.0)
    assert meter.images == 32


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(5, 1), (5, 4), (5, 5), (1, 1), (0, 0), (0, 1)])
def test_too_short_a_run_has_no_rate(machine, warmup_steps, num_steps):
    meter = machine.meter(warmup_steps)
    machine.steps(meter, [1.0] * num_steps)
    assert meter.pause() is None
    assert meter.images_per_second is None
    assert (meter.images, meter.seconds) == (0, 0.0)


@pytest.mark.parametrize(("warmup_steps", "num_steps"), [(5, 6), (1, 2), (0, 2)])
def test_one_more_step_gives_a_rate(machine, warmup_steps, num_steps):
    meter = machine.meter(warmup_steps)
    machine.steps(meter, [2.0] * num_steps)
    assert meter.pause() == pytest.approx(8.0)


def test_epochs_of_one_step_have_no_rate(machine):
    meter = machine.meter(2)
    for _ in range(10):
        machine.steps(meter, [1.0])
        assert meter.pause() is None
    assert meter.images_per_second is None


def test_a_slow_start_does_not_change_the_rate(machine):
    slow, fast = machine.meter(5), machine.meter(5)
    machine.steps(slow, [3.0] + [0.05] * 19)
    slow.pause()
    machine.steps(fast, [0.05] * 20)
    fast.pause()
    assert slow.images_per_second == pytest.approx(fast.images_per_second)


def test_the_device_is_waited_for_at_the_ends_of_a_window_only(machine):
    meter = machine.meter(2)
    machine.steps(meter, [1.0] * 20)
    assert machine.synchronisations == 1
    meter.pause()
    assert machine.synchronisations == 2


def test_the_clock_is_read_after_the_device_has_finished(machine):
    """A step returns when its kernels are queued; the wait is what takes the time."""
    machine.synchronize = lambda: setattr(machine, "now", machine.now + 4.0)
    meter = machine.meter(1)
    machine.steps(meter, [0.0] * 5)
    assert meter.pause() == pytest.approx(4 * 16 / 4.0)


def test_a_second_pause_adds_nothing(machine):
    meter = machine.meter(1)
    machine.steps(meter, [1.0] * 3)
    assert meter.pause() == pytest.approx(16.0)
    assert meter.pause() is None
    assert meter.images == 32
