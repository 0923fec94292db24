"""Training and validation: the step, the epoch, and `fit` around them."""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from image_classification.config import RunPlan
from image_classification.data import EvalLoader, TrainLoader
from image_classification.divergence import FirstBadStep, first_non_finite, non_finite_of
from image_classification.ema import WeightAverage
from image_classification.freezing import train_mode
from image_classification.losses import cross_entropy
from image_classification.metrics import Metrics, MetricSums
from image_classification.mixup import Mixup
from image_classification.precision import Precision
from image_classification.schedule import Schedule
from mmcls.utils.device import seed_everything
from mmcls.utils.distribution import average_norm_statistics, get_rank, sum_over_ranks
from mmcls.utils.errors import DivergenceError

Batch = tuple[Tensor, Tensor]
"""Images, [N, 3, H, W], float32, normalised; labels, [N], int64; both on the device."""


MAX_SKIPS_IN_A_ROW = 20
"""Updates that overflows may leave out one after the other before the run counts as diverged."""


@dataclass
class TrainState:
    """What a step reads and changes.

    Attributes:
        module: the network itself.
        model: what the step calls: `module`, or the distributed wrapper around it.
        precision: the level that both are on; it also has the optimizer.
        max_grad_norm: limit of the norm of all gradients together.
        ema: moving average of the weights.
        step: optimizer updates done since the run began, those that an overflow left out among them.
        best: top-1 in percent and epoch of the best validation.
    """

    module: nn.Module
    model: nn.Module
    precision: Precision
    schedule: Schedule
    label_smoothing: float
    seed: int
    device: torch.device
    max_grad_norm: float | None = None
    mixup: Mixup | None = None
    ema: WeightAverage | None = None
    step: int = 0
    best: tuple[float, int] = (-1.0, -1)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self.precision.optimizer


class Observer(Protocol):
    """Who is told how the run goes: reporting.Reporter on rank 0, nobody elsewhere."""

    def step_done(self, state: TrainState, sums: MetricSums, data_seconds: float) -> None: ...
    def training_paused(self) -> None: ...
    def epoch_done(
        self, state: TrainState, epoch: int, train: Metrics, validation: Metrics, ema: Metrics | None
    ) -> None: ...


StepFunction = Callable[[TrainState, list[Batch]], MetricSums]


def clip_together(state: TrainState) -> None:
    """Limits the norm of all gradients together to `max_grad_norm`, where one is set."""
    if state.max_grad_norm is not None:
        state.precision.clip_gradients(state.max_grad_norm)


def train_step(state: TrainState, group: list[Batch], clip: Callable[[TrainState], None] = clip_together) -> MetricSums:
    """One optimizer update over a group of micro-batches.

    Args:
        clip: changes the unscaled gradients, `grad` of the optimizer's parameters, before the update.

    Returns:
        This rank's sums over the group, on the device.
    """
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = state.schedule(state.step)
    sums = MetricSums.zeros(state.device)
    num_images = sum(len(labels) for _, labels in group)
    for position, (images, labels) in enumerate(group):
        targets, last = labels, position == len(group) - 1
        if state.mixup:
            images, targets = state.mixup(images, labels, state.step, position)
        with sync_gradients(state.model, last or state.precision.unscales_each_pass):
            logits = state.precision.forward(state.model, images)
            loss = cross_entropy(logits, targets, state.label_smoothing)
            state.precision.backward(loss * (len(labels) / num_images), last)
        sums.add(loss, logits, labels)
    state.precision.unscale()
    clip(state)
    if state.precision.step() and state.ema:
        state.ema.update(state.precision.weights(), state.step)
    state.precision.zero_gradients()
    state.step += 1
    return sums


def sync_gradients(model: nn.Module, last: bool) -> AbstractContextManager:
    """Averages the gradients over the ranks in the last micro-batch of a group only."""
    if isinstance(model, DistributedDataParallel) and not last:
        return model.no_sync()
    return nullcontext()


def fix_summation_order(state: TrainState, images: Tensor, labels: Tensor) -> None:
    """Runs one forward and backward pass and discards it.

    DistributedDataParallel sorts its gradient buckets anew after the first backward pass, which changes the order of
    summation from three ranks on. With this pass done, a resumed run sums in the order of the uninterrupted one.
    Gradients that must stay in their buffer cannot be discarded, so runs with such ones are left as they are.
    """
    if not isinstance(state.model, DistributedDataParallel) or state.precision.combines_gradients:
        return
    buffers = {name: buffer.clone() for name, buffer in state.module.named_buffers()}
    cross_entropy(state.precision.forward(state.model, images), labels).backward()
    state.module.zero_grad(set_to_none=True)
    for name, buffer in state.module.named_buffers():
        buffer.copy_(buffers[name])


def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Gathers `size` micro-batches at a time."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def train_epoch(
    state: TrainState,
    loader: TrainLoader,
    plan: RunPlan,
    observer: Observer | None,
    step_function: StepFunction,
    check_every: int,
) -> Metrics:
    """Trains from `state.step` to the end of its epoch, or of the run.

    Returns:
        Averages over the images of all ranks.

    Raises:
        DivergenceError: a loss is not finite where no overflow is expected, or too many updates were skipped.
    """
    epoch, first_step = divmod(state.step, plan.steps_per_epoch)
    seed_everything(epoch_seed(state.seed, epoch, get_rank()), state.device)
    train_mode(state.model)
    epoch_sums, bad_step = MetricSums.zeros(state.device), FirstBadStep(state.device)
    augment = epoch < plan.epochs - plan.no_augment_epochs
    micro_batches = loader.epoch(epoch, first_step * plan.accumulation_steps, augment)
    batches = grouped(micro_batches, plan.accumulation_steps)
    end = min((epoch + 1) * plan.steps_per_epoch, plan.total_steps)
    while state.step < end:
        started = time.perf_counter()
        group = next(batches)
        data_seconds = time.perf_counter() - started
        sums = step_function(state, group)
        epoch_sums += sums
        in_epoch = state.step - epoch * plan.steps_per_epoch
        if state.precision.skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            what = f"{MAX_SKIPS_IN_A_ROW} updates in a row overflowed"
            raise diverged(state, plan, state.step - 1, what, _find_non_finite(state, group))
        if not state.precision.skips_overflows:
            bad_step.add(sums.values[0], state.step - 1)
            found = bad_step.read() if in_epoch % check_every == 0 or state.step == end else None
            if found is not None:
                raise diverged(state, plan, found[0], f"loss is {found[1]}", _find_non_finite(state, group))
        if observer:
            observer.step_done(state, sums, data_seconds)
    if observer:
        observer.training_paused()
    sum_over_ranks(epoch_sums.values)
    return epoch_sums.averages()


def diverged(state: TrainState, plan: RunPlan, step: int, what: str, tensor: str | None) -> DivergenceError:
    """The error that ends a run, with what helps to find the cause: place, learning rate, scale, first bad tensor."""
    epoch, in_epoch = divmod(step, plan.steps_per_epoch)
    return DivergenceError(
        f"{what} at epoch {epoch} step {in_epoch + 1} (lr {state.schedule(step):g}, loss scale "
        f"{state.precision.loss_scale:g}; first tensor that is not finite: {tensor or 'none is left in the last batch'}); "
        f"lower --lr, or take a longer --warmup"
    )


def _find_non_finite(state: TrainState, group: list[Batch]) -> str | None:
    """The first tensor that is not finite, by one more pass over the last images; of no use but to a run that ends."""

    def scaled_loss() -> Tensor:
        losses = [cross_entropy(state.precision.forward(state.module, images), labels) for images, labels in group]
        return torch.stack(losses).mean() * state.precision.loss_scale

    return first_non_finite(state.module, scaled_loss)


def check_finite(loss: float, what: str) -> None:
    """Raises DivergenceError where a loss is inf or nan."""
    if not math.isfinite(loss):
        raise DivergenceError(f"the {what} is {loss}; give other weights")


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """The seed of a rank's generators in an epoch: a pure function, so resuming needs no generator state."""
    return int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@torch.no_grad()
def validate(state: TrainState, weights: dict[str, Tensor], loader: EvalLoader, num_images: int) -> Metrics:
    """Validates weights on all images of all ranks, none twice and none left out, in float32.

    The weights are those that are saved, so any program that loads the file finds the same accuracy.

    Those that the loader could not decode and was told to skip are missing in the count, and in nothing else.

    Raises:
        RuntimeError: the number of images seen and skipped is not `num_images`.
    """
    sums = MetricSums.zeros(state.device)
    for images, labels in loader:
        logits = state.precision.infer(weights, images)
        sums.add(cross_entropy(logits, labels), logits, labels)
    sum_over_ranks(sums.values)
    metrics = sums.averages()
    skipped = sum_over_ranks(torch.tensor([loader.num_left_out], device=state.device)).item()
    if metrics.count + skipped != num_images:
        raise RuntimeError(f"validated {metrics.count} images of {num_images}, {skipped} skipped")
    return metrics


def fit(
    state: TrainState,
    train_loader: TrainLoader,
    val_loader: EvalLoader,
    plan: RunPlan,
    *,
    observer: Observer | None = None,
    save: Callable[[TrainState, bool], None] | None = None,
    after_validation: Callable[[], None] | None = None,
    step_function: StepFunction = train_step,
    check_every: int = 10,
) -> None:
    """Trains epoch after epoch until the plan is fulfilled, validating and saving after each.

    Raises:
        DivergenceError: see `train_epoch`; also where a validation loss is not finite. Nothing of that epoch is saved.

    Args:
        observer: told about each step and epoch; given on one rank only.
        save: called after each epoch with whether it is the best so far; given on one rank only.
        after_validation: called after each epoch before the two above; may communicate, so given on all ranks.
        step_function: the training step; another one with the signature of `train_step` may be passed.
        check_every: steps between two looks at whether the loss is finite, for each of which the host waits.
    """
    while state.step < plan.total_steps:
        epoch = state.step // plan.steps_per_epoch
        train = train_epoch(state, train_loader, plan, observer, step_function, check_every)
        average_norm_statistics(dict(state.module.named_buffers()))
        weights = state.precision.weights()
        validation = validate(state, weights, val_loader, plan.num_val_images)
        # The last update of an epoch shows in no training loss, and a norm's statistic may show in no loss at all.
        bad_weight = non_finite_of(weights)
        if bad_weight or not math.isfinite(validation.loss):
            what = f"validation loss is {validation.loss}"
            raise diverged(state, plan, state.step - 1, what, bad_weight)
        ema = None
        if state.ema:
            average_norm_statistics(state.ema.weights)
            ema = validate(state, state.ema.weights, val_loader, plan.num_val_images)
        if after_validation:
            after_validation()
        is_best = validation.top1_percent > state.best[0]
        if is_best:
            state.best = (validation.top1_percent, epoch)
        if observer:
            observer.epoch_done(state, epoch, train, validation, ema)
        if save:
            save(state, is_best)
