"""The learning rate as a pure function of the step: nothing to save, and a resumed run cannot disagree."""

import math
from collections.abc import Callable

from image_classification.config import ScheduleConfig

Schedule = Callable[[int], float]
"""From step, counted from 0 over the whole run, to learning rate."""


def make_schedule(
    config: ScheduleConfig,
    peak_lr: float,
    steps_per_epoch: int,
    total_steps_of_all_epochs: int,
    *,
    warmup_epochs: float,
) -> Schedule:
    """Makes the function from step to learning rate.

    The warm-up is linear and ends at `peak_lr` (Goyal et al. 2017, arXiv:1706.02677, section 2.2). After it, `step`
    multiplies by gamma at each milestone; `cosine` (Loshchilov and Hutter 2017, arXiv:1608.03983, equation 5, with
    minimum 0 and no restart), `linear` and `polynomial`, which is linear raised to a power (2 in You et al. 2017,
    arXiv:1708.03888), fall from the end of the warm-up to 0 at `total_steps_of_all_epochs`.

    Args:
        config: shape, milestones (in epochs), gamma and power.
        peak_lr: learning rate at the end of the warm-up.
        steps_per_epoch: optimizer steps of one epoch.
        total_steps_of_all_epochs: optimizer steps of `config.epochs` epochs. A limit by `max_steps` does not enter
            here, so a run that it cuts short has the learning rates of the whole run's first steps.
        warmup_epochs: length of the warm-up, rounded to whole steps.
    """
    warmup_steps = round(warmup_epochs * steps_per_epoch)
    decay_steps = max(1, total_steps_of_all_epochs - warmup_steps)
    milestone_steps = [milestone * steps_per_epoch for milestone in config.milestones]

    def learning_rate(step: int) -> float:
        if step < warmup_steps:
            return peak_lr * ((step + 1) / warmup_steps)
        if config.schedule == "step":
            return peak_lr * config.gamma ** sum(step >= milestone for milestone in milestone_steps)
        progress = min(1.0, (step - warmup_steps) / decay_steps)
        if config.schedule == "cosine":
            return peak_lr * 0.5 * (1 + math.cos(math.pi * progress))
        return peak_lr * (1 - progress) ** (config.power if config.schedule == "polynomial" else 1)

    return learning_rate
