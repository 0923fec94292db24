"""One rank: from a checked job to a finished run."""

import os
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import torch

from image_classification.checkpoint import (
    BEST,
    LAST,
    load_weights,
    read_checkpoint,
    read_weights,
    resumed_step,
    save_checkpoint,
)
from image_classification.config import ModelConfig, RunPlan, TrainConfig, resolve, to_plain
from image_classification.data import Datasets, EvalLoader, TrainLoader, open_datasets
from image_classification.ema import WeightAverage
from image_classification.freezing import freeze, freeze_all_but_head
from image_classification.mixup import Mixup
from image_classification.optim import build_optimizer
from image_classification.precision import Precision, make_precision, memory_format
from image_classification.preflight import Job, new_head, output_folder
from image_classification.reporting import Reporter
from image_classification.resnet import build_resnet
from image_classification.schedule import make_schedule
from image_classification.training import TrainState, check_finite, fit, fix_summation_order, validate
from mmcls.utils.ascend_errors import explain, is_busy
from mmcls.utils.device import make_deterministic, seed_everything, set_device, use_full_float32
from mmcls.utils.distribution import (
    destroy_process_group,
    gather_over_ranks,
    get_rank,
    get_world_size,
    init_process_group,
    same_on_all_ranks,
    wrap_distributed_model,
    wrap_non_distributed_model,
)
from mmcls.utils.errors import RequestError

RUN_FOLDER_FILE = "run_folder"
BUSY_WAIT_SECONDS = 10

T = TypeVar("T")


def run_rank(job: Job) -> None:
    """Trains or validates as the rank that the environment names (RANK, LOCAL_RANK, WORLD_SIZE)."""
    config = job.config
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    card = job.cards[local_rank] if job.cards else 0
    device = retry_if_busy(lambda: set_device(config.distributed.device, card))
    if config.run.deterministic:
        make_deterministic(device.type)
    use_full_float32(device)
    # Before the group is joined: reading data is what makes ranks late, and a collective waits only so long.
    datasets = open_datasets(job.layout, config.data, config.data.image_size)
    distributed = config.distributed
    init_process_group(device, distributed.dist_backend, distributed.dist_timeout)
    try:
        _run(job, datasets, device)
    finally:
        destroy_process_group()


def retry_if_busy(function: Callable[[], T]) -> T:
    """Calls it again once, after a wait, where a card is still held by an old job (EJ0001)."""
    try:
        return function()
    except RuntimeError as error:
        if not is_busy(str(error)):
            raise
        print(f"{explain(str(error))}; trying once more in {BUSY_WAIT_SECONDS} s", file=sys.stderr, flush=True)
        time.sleep(BUSY_WAIT_SECONDS)
        return function()


def _run(job: Job, datasets: Datasets, device: torch.device) -> None:
    config = job.config
    plan = resolve(config, get_world_size(), len(datasets.train), len(datasets.val))
    if not same_on_all_ranks(plan.steps_per_epoch, device):
        raise RequestError(
            f"--data_path={config.data.data_path}",
            "the ranks see different numbers of images",
            "give all the same data",
        )
    if not same_on_all_ranks(zlib.crc32(repr(config.precision).encode()), device):
        raise RequestError(
            "--opt_level and --amp_engine", "the machines have chosen different ones", "give both on every machine"
        )
    state, notes = build_state(config, plan, device)
    reporter = None
    if get_rank() == 0:
        reporter = Reporter(config, plan, config.model.num_classes, device, job.started_at)
        folder = reporter.open(output_folder(config.run), job.notes, notes)
        (job.handover / RUN_FOLDER_FILE).write_text(str(folder), encoding="utf-8")
    val_loader = EvalLoader(datasets.val, **_loader_options(config, device), batch_size=plan.micro_batch_size)
    try:
        if config.run.evaluate:
            validation = validate(state, state.precision.weights(), val_loader, plan.num_val_images)
            check_finite(validation.loss, "validation loss")
            ema = validate(state, state.ema.weights, val_loader, plan.num_val_images) if state.ema else None
            if config.data.on_bad_image == "skip":
                report_bad_images([val_loader], reporter)
            if reporter:
                reporter.evaluation_done(validation, ema)
        else:
            _train(job, plan, state, datasets, val_loader, reporter)
    finally:
        val_loader.close()
        if reporter:
            reporter.close()


def _train(
    job: Job,
    plan: RunPlan,
    state: TrainState,
    datasets: Datasets,
    val_loader: EvalLoader,
    reporter: Reporter | None,
) -> None:
    config = job.config
    train_loader = TrainLoader(
        datasets.train,
        **_loader_options(config, state.device),
        micro_batch_size=plan.micro_batch_size,
        micro_batches_per_epoch=plan.steps_per_epoch * plan.accumulation_steps,
        seed=config.run.seed,
    )
    shape = (plan.micro_batch_size, 3, config.data.image_size, config.data.image_size)
    images = torch.zeros(shape, device=state.device).to(
        memory_format=memory_format(config.precision, state.device.type)
    )
    fix_summation_order(state, images, torch.zeros(len(images), dtype=torch.int64, device=state.device))
    if reporter:
        reporter.training_started(state)
    try:
        save = checkpoint_writer(config, plan, datasets.class_names, reporter.folder) if reporter else None
        collect = None
        if config.data.on_bad_image == "skip":
            collect = partial(report_bad_images, [train_loader, val_loader], reporter)
        fit(state, train_loader, val_loader, plan, observer=reporter, save=save, after_validation=collect,
            step_function=job.step_function, check_every=config.run.print_freq)  # fmt: skip
    finally:
        train_loader.close()
    if reporter:
        reporter.run_done(state)


def report_bad_images(loaders: Sequence[TrainLoader | EvalLoader], reporter: Reporter | None) -> None:
    """Tells the reporter which pictures any rank has skipped so far; called on every rank."""
    own = [(error.path, error.reason) for loader in loaders for error in loader.bad_images]
    found = gather_over_ranks(own)
    if reporter:
        reporter.bad_images_found(dict(chain(*found)))


def _loader_options(config: TrainConfig, device: torch.device) -> dict:
    return {
        "rank": get_rank(),
        "world_size": get_world_size(),
        "device": device,
        "config": config.data,
        "memory_format": memory_format(config.precision, device.type),
    }


def build_state(config: TrainConfig, plan: RunPlan, device: torch.device) -> tuple[TrainState, list[str]]:
    """Builds network, optimizer and the rest, and fills them from --resume or --pretrained.

    Returns:
        The state and what was loaded, a line each.
    """
    model_config = config.model
    seed_everything(config.run.seed, device)
    module = build_resnet(
        model_config.arch,
        model_config.num_classes,
        stem=model_config.stem,
        width_multiplier=model_config.width_multiplier,
        zero_init_last_norm=model_config.zero_init_last_norm,
    )
    notes, checkpoint = [], None
    if config.run.pretrained:
        subject = f"--pretrained={config.run.pretrained}"
        weights = read_weights(config.run.pretrained)
        note = load_weights(module, weights, subject, new_head(config))
        notes.append(note or f"{subject}: all weights loaded")
    elif config.run.resume:
        checkpoint = read_checkpoint(config.run.resume)
        load_weights(module, checkpoint["model"], f"--resume={config.run.resume}")
    notes += _freeze(module, model_config)
    module = wrap_non_distributed_model(module, device).to(memory_format=memory_format(config.precision, device.type))
    # A level changes the weights that an optimizer steps, so it comes between the optimizer and the wrapper.
    precision = make_precision(config.precision, module, build_optimizer(module, config.optim, plan.peak_lr), device)
    steps_of_all_epochs = plan.steps_per_epoch * plan.epochs
    ema_decay = config.optim.ema_decay
    if config.run.evaluate and (checkpoint is None or checkpoint["ema"] is None):
        ema_decay = None
    state = TrainState(
        module=module,
        model=_wrap(module, device, precision),
        precision=precision,
        schedule=make_schedule(
            config.schedule,
            plan.peak_lr,
            plan.steps_per_epoch,
            steps_of_all_epochs,
            warmup_epochs=plan.warmup_epochs,
        ),
        label_smoothing=config.optim.label_smoothing,
        seed=config.run.seed,
        device=device,
        max_grad_norm=config.optim.clip_grad_norm,
        mixup=_make_mixup(config, plan),
        ema=None if ema_decay is None else WeightAverage(precision.weights(), ema_decay),
    )
    if checkpoint:
        notes += _restore_average(state, checkpoint)
    if checkpoint and not config.run.evaluate:
        notes += _resume(state, checkpoint, config.run.resume, plan)
    return state, notes


def _freeze(module: torch.nn.Module, config: ModelConfig) -> list[str]:
    """Freezes what the options name; a line that says how much."""
    if not config.freeze and not config.fine_tuning:
        return []
    if config.fine_tuning:
        freeze_all_but_head(module)
    else:
        freeze(module, config.freeze)
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in module.parameters()]
    frozen = sum(size for size, trains in sizes if not trains)
    return [f"{frozen} of {sum(size for size, _ in sizes)} weights are frozen"]


def _make_mixup(config: TrainConfig, plan: RunPlan) -> Mixup | None:
    data = config.data
    if data.mixup == data.cutmix == 0:
        return None
    return Mixup(
        data.mixup,
        data.cutmix,
        num_classes=config.model.num_classes,
        seed=config.run.seed,
        rank=get_rank(),
        stop_step=(plan.epochs - plan.no_augment_epochs) * plan.steps_per_epoch,
    )


def _wrap(module: torch.nn.Module, device: torch.device, precision: Precision) -> torch.nn.Module:
    """The distributed wrapper, where there are ranks to share the work with."""
    if get_world_size() == 1:
        return module
    # Views of the buckets would be overwritten by the next pass while Apex still holds them.
    shares_memory = not (precision.combines_gradients or precision.unscales_each_pass)
    return wrap_distributed_model(module, device, gradient_as_bucket_view=shares_memory)


def _restore_average(state: TrainState, checkpoint: dict) -> list[str]:
    if state.ema is None:
        return []
    if checkpoint["ema"] is None:
        return ["the checkpoint has no moving average of the weights: it starts at the weights"]
    try:
        state.ema.load_state_dict(checkpoint["ema"])
    except ValueError as error:
        raise RequestError("--resume", f"its moving average does not fit ({error})", "give another file") from error
    return []


def _resume(state: TrainState, checkpoint: dict, path: str, plan: RunPlan) -> list[str]:
    # The options of the groups are this run's, as differences from the saved ones have been told.
    options = [{k: v for k, v in group.items() if k != "params"} for group in state.optimizer.param_groups]
    state.optimizer.load_state_dict(checkpoint["optimizer"])
    for group, own in zip(state.optimizer.param_groups, options, strict=True):
        group.update(own)
    note = state.precision.load_state_dict(checkpoint["precision"])
    notes = [note] if note else []
    state.step = resumed_step(checkpoint, plan)
    state.best = tuple(checkpoint["best"])
    epoch, offset = divmod(state.step, plan.steps_per_epoch)
    inside = f", step {offset} of {plan.steps_per_epoch}" if offset else ""
    scale = f"; loss scale {state.precision.loss_scale:g}" if state.precision.scales_loss else ""
    best = f"best so far {state.best[0]:.3f} in epoch {state.best[1]}"
    return [*notes, f"resumed {path}: next is epoch {epoch}{inside}; {best}{scale}"]


def checkpoint_writer(
    config: TrainConfig, plan: RunPlan, class_names: tuple[str, ...], folder: Path
) -> Callable[[TrainState, bool], None]:
    """Makes the function that saves a state, and saves it again as the best where it is."""
    portable = replace(config, run=replace(config.run, resume=None, pretrained=None))

    def save(state: TrainState, is_best: bool) -> None:
        contents = {
            "model": state.precision.weights(),
            "ema": state.ema.state_dict() if state.ema else None,
            "optimizer": state.optimizer.state_dict(),
            "precision": state.precision.state_dict(),
            "step": state.step,
            "rng": {"seed": state.seed},
            "best": list(state.best),
            "config": to_plain(portable),
            "plan": to_plain(plan),
            "num_classes": config.model.num_classes,
            "class_names": list(class_names),
        }
        save_checkpoint(contents, folder / LAST)
        if is_best:
            save_checkpoint(contents, folder / BEST)

    return save
