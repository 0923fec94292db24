"""Images per second, measured between device synchronisations."""

import time
from collections.abc import Callable


class ThroughputMeter:
    """Counts images in windows whose ends are synchronised, so that rate x seconds = images.

    A window opens at the end of a step and closes before validation. The first opens after `warmup_steps` steps,
    later ones after the first step of an epoch, so that neither start-up nor the gap between epochs is in one.

    Args:
        synchronize: waits for the device.
        warmup_steps: first steps of the run that are left out.
        clock: seconds; replaced in tests.
    """

    def __init__(
        self, synchronize: Callable[[], None], warmup_steps: int, clock: Callable[[], float] = time.perf_counter
    ):
        self._synchronize, self._clock = synchronize, clock
        self._steps_to_skip = self.warmup_steps = warmup_steps
        self._opened_at: float | None = None
        self._open_images = 0
        self.images, self.seconds = 0, 0.0

    def step_done(self, num_images: int) -> None:
        """Takes note of one finished step of all ranks."""
        if self._opened_at is not None:
            self._open_images += num_images
            return
        self._steps_to_skip -= 1
        if self._steps_to_skip <= 0:
            self._synchronize()
            self._opened_at, self._open_images = self._clock(), 0

    def pause(self) -> float | None:
        """Closes the window.

        Returns:
            Its images per second; None where no step was in it.
        """
        if self._opened_at is None or self._open_images == 0:
            self._opened_at = None
            return None
        self._synchronize()
        seconds = self._clock() - self._opened_at
        images = self._open_images
        self.images += images
        self.seconds += seconds
        self._opened_at = None
        return images / seconds

    @property
    def images_per_second(self) -> float | None:
        """Over all closed windows; None where no step was in one."""
        return self.images / self.seconds if self.images else None
