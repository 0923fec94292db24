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
from image_classification.losses import cross_entropy
from image_classification.metrics import Metrics, MetricSums
from image_classification.precision import Precision
from image_classification.schedule import Schedule
from mmcls.utils.device import seed_everything
from mmcls.utils.distribution import average_norm_statistics, get_rank, sum_over_ranks
from mmcls.utils.errors import DivergenceError

Batch = tuple[Tensor, Tensor]
"""Images, [N, 3, H, W], float32, normalised; labels, [N], int64; both on the device."""


@dataclass
class TrainState:
    """What a step reads and changes.

    Attributes:
        module: the network itself; validated and saved.
        model: what the step calls: `module`, or the distributed wrapper around it.
        step: optimizer updates done since the run began.
        skipped_updates: of those, the ones that an overflow of the short type left out.
        best: top-1 in percent and epoch of the best validation.
    """

    module: nn.Module
    model: nn.Module
    optimizer: torch.optim.Optimizer
    precision: Precision
    schedule: Schedule
    label_smoothing: float
    seed: int
    device: torch.device
    step: int = 0
    skipped_updates: int = 0
    best: tuple[float, int] = (-1.0, -1)


class Observer(Protocol):
    """Who is told how the run goes: reporting.Reporter on rank 0, nobody elsewhere."""

    def step_done(self, state: TrainState, sums: MetricSums, data_seconds: float) -> None: ...
    def training_paused(self) -> None: ...
    def epoch_done(self, state: TrainState, epoch: int, train: Metrics, validation: Metrics) -> None: ...


StepFunction = Callable[[TrainState, list[Batch]], MetricSums]


def train_step(state: TrainState, group: list[Batch]) -> MetricSums:
    """One optimizer update over a group of micro-batches.

    Returns:
        This rank's sums over the group, on the device.
    """
    for parameters in state.optimizer.param_groups:
        parameters["lr"] = state.schedule(state.step)
    sums = MetricSums.zeros(state.device)
    num_images = sum(len(labels) for _, labels in group)
    for position, (images, labels) in enumerate(group, start=1):
        with sync_gradients(state.model, last=position == len(group)):
            with state.precision.autocast():
                logits = state.model(images)
            loss = cross_entropy(logits, labels, state.label_smoothing)
            state.precision.backward(loss * (len(labels) / num_images))
        sums.add(loss, logits, labels)
    state.skipped_updates += not state.precision.step()
    state.optimizer.zero_grad(set_to_none=True)
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
    """
    if not isinstance(state.model, DistributedDataParallel):
        return
    buffers = {name: buffer.clone() for name, buffer in state.module.named_buffers()}
    with state.precision.autocast():
        logits = state.model(images)
    cross_entropy(logits, labels).backward()
    state.optimizer.zero_grad(set_to_none=True)
    for name, buffer in state.module.named_buffers():
        buffer.copy_(buffers[name])


def grouped(batches: Iterable[Batch], size: int) -> Iterator[list[Batch]]:
    """Gathers `size` micro-batches at a time."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def train_epoch(
    state: TrainState, loader: TrainLoader, plan: RunPlan, observer: Observer | None, step_function: StepFunction
) -> Metrics:
    """Trains from `state.step` to the end of its epoch, or of the run.

    Returns:
        Averages over the images of all ranks.

    Raises:
        DivergenceError: the loss is not finite.
    """
    epoch, first_step = divmod(state.step, plan.steps_per_epoch)
    seed_everything(epoch_seed(state.seed, epoch, get_rank()), state.device)
    state.model.train()
    epoch_sums = MetricSums.zeros(state.device)
    batches = grouped(loader.epoch(epoch, first_step * plan.accumulation_steps), plan.accumulation_steps)
    while state.step < min((epoch + 1) * plan.steps_per_epoch, plan.total_steps):
        started = time.perf_counter()
        group = next(batches)
        data_seconds = time.perf_counter() - started
        sums = step_function(state, group)
        epoch_sums += sums
        if observer:
            observer.step_done(state, sums, data_seconds)
    if observer:
        observer.training_paused()
    sum_over_ranks(epoch_sums.values)
    metrics = epoch_sums.averages()
    check_finite(metrics.loss, f"training loss of epoch {epoch}")
    return metrics


def check_finite(loss: float, what: str) -> None:
    """Raises DivergenceError where a loss is inf or nan."""
    if not math.isfinite(loss):
        raise DivergenceError(f"the {what} is {loss}; lower the learning rate (--lr)")


def epoch_seed(seed: int, epoch: int, rank: int) -> int:
    """The seed of a rank's generators in an epoch: a pure function, so resuming needs no generator state."""
    return int(np.random.SeedSequence((seed, epoch, rank)).generate_state(1, np.uint64)[0] >> np.uint64(1))


@torch.no_grad()
def validate(state: TrainState, loader: EvalLoader, num_images: int) -> Metrics:
    """Validates the unwrapped network on all images of all ranks, none twice and none left out.

    Those that the loader could not decode and was told to skip are missing in the count, and in nothing else.

    Raises:
        RuntimeError: the number of images seen and skipped is not `num_images`.
    """
    state.module.eval()
    sums = MetricSums.zeros(state.device)
    for images, labels in loader:
        with state.precision.autocast():
            logits = state.module(images)
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
) -> None:
    """Trains epoch after epoch until the plan is fulfilled, validating and saving after each.

    Raises:
        DivergenceError: a loss is not finite; nothing of that epoch is saved.

    Args:
        observer: told about each step and epoch; given on one rank only.
        save: called after each epoch with whether it is the best so far; given on one rank only.
        after_validation: called after each epoch before the two above; may communicate, so given on all ranks.
        step_function: the training step; another one with the signature of `train_step` may be passed.
    """
    while state.step < plan.total_steps:
        epoch = state.step // plan.steps_per_epoch
        train = train_epoch(state, train_loader, plan, observer, step_function)
        average_norm_statistics(state.module)
        validation = validate(state, val_loader, plan.num_val_images)
        # The last update of an epoch shows in no training loss of that epoch.
        check_finite(validation.loss, f"validation loss of epoch {epoch}")
        if after_validation:
            after_validation()
        is_best = validation.top1_percent > state.best[0]
        if is_best:
            state.best = (validation.top1_percent, epoch)
        if observer:
            observer.epoch_done(state, epoch, train, validation)
        if save:
            save(state, is_best)
