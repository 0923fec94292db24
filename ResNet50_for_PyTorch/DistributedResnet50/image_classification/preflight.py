"""What can be known before any rank is started: devices, precision, numbers, checkpoints. A wrong request ends here."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from image_classification.checkpoint import load_weights, read_checkpoint, read_weights, resumed_step
from image_classification.config import RunConfig, RunPlan, TrainConfig, resolve, to_plain
from image_classification.data import DataLayout, absolute_path, check_loaders, open_datasets, prepare_data
from image_classification.freezing import freeze
from image_classification.levels import resolve_level
from image_classification.optim import build_optimizer
from image_classification.placement import check_backend, choose_devices
from image_classification.precision import choose_engine, memory_format
from image_classification.resnet import build_resnet
from image_classification.training import StepFunction, train_step
from mmcls.utils.device import default_half_type, has_fast_half
from mmcls.utils.distribution import started_as_rank
from mmcls.utils.errors import RequestError

DEFAULT_OUTPUT = Path(__file__).resolve().parents[3] / "test" / "output"
CIFAR_STEM_UP_TO = 64
SYNTHETIC_GLOBAL_BATCHES = 100
MAX_WORKERS = 8
KEPT = (("optim", "optimizer"), ("model", "freeze"), ("model", "fine_tuning"))
"""Options that decide what the state of an optimizer consists of, by section."""


@dataclass(frozen=True)
class Job:
    """A request that was checked and completed; the same for every rank.

    Attributes:
        config: with every `auto` and default resolved.
        cards: the card of each rank of this machine; empty on the CPU.
        num_ranks: ranks of this machine.
        notes: what the user should know, a line each.
        plan: the numbers of the run.
        started_at: when the command was started, seconds since the epoch.
        handover: folder in which the ranks leave word for the launcher.
        step_function: the training step.
    """

    config: TrainConfig
    layout: DataLayout
    cards: tuple[int, ...]
    num_ranks: int
    notes: tuple[str, ...]
    plan: RunPlan
    started_at: float
    handover: Path | None = None
    step_function: StepFunction = train_step


def prepare_job(config: TrainConfig, layout: DataLayout, started_at: float) -> Job:
    """Checks a request against this machine and the data, and fills in what was left open.

    Raises:
        RequestError: it cannot be carried out.
    """
    config, cards, num_ranks, notes = choose_devices(config)
    check_backend(config)
    config, precision_notes = _choose_precision(config)
    layout = prepare_data(layout)
    if layout.kind == "synthetic" and config.model.num_classes:
        layout = replace(layout, num_classes=config.model.num_classes)
    if layout.path is not None:  # absolute, so that a resumed run finds it from anywhere
        config = replace(config, data=replace(config.data, data_path=str(absolute_path(config.data.data_path))))
    config, model_notes = _complete_model(config, layout)
    world_size = int(os.environ["WORLD_SIZE"]) if started_as_rank() else num_ranks * config.distributed.world_size
    config, data_notes = _complete_data(config, layout, num_ranks, world_size)
    datasets = open_datasets(layout, config.data, config.data.image_size)
    plan = resolve(config, world_size, len(datasets.train), len(datasets.val))
    limit_notes = check_loaders(datasets.train, config.data, num_ranks)
    _check_output(config)
    if not config.run.evaluate:
        _check_norms_have_values(config)
    network_notes = _check_network(config, plan)
    lr_source = "--lr" if config.optim.lr is not None else f"{config.optim.lr_per_256:g} per 256 images"
    notes += [layout.description, *layout.warnings, *datasets.warnings]
    notes += [
        *model_notes,
        *precision_notes,
        *data_notes,
        *limit_notes,
        plan.batch_line,
        f"learning rate {plan.peak_lr:g} ({lr_source})",
        *network_notes,
    ]
    notes.append(f"{plan.num_train_images} training images in {plan.steps_per_epoch} steps an epoch, "
                 f"{plan.left_out_images} left out by each epoch's order; {plan.num_val_images} validation images")  # fmt: skip
    return Job(config, layout, cards, num_ranks, tuple(notes), plan, started_at)


def output_folder(config: RunConfig) -> Path:
    """The folder of all runs."""
    return Path(config.output_dir).expanduser() if config.output_dir else DEFAULT_OUTPUT


def _check_output(config: TrainConfig) -> None:
    """The run's folder is made when the first step is near; that it can be made is seen here."""
    subject = f"--output_dir={config.run.output_dir or DEFAULT_OUTPUT}"
    try:
        path = output_folder(config.run).absolute()
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
    except (OSError, RuntimeError) as error:
        raise RequestError(subject, f"is no path ({error})", "check it") from error
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        raise RequestError(subject, f"nothing can be written in {existing}", "name another folder")


def _complete_model(config: TrainConfig, layout: DataLayout) -> tuple[TrainConfig, list[str]]:
    image_size = config.data.image_size or layout.image_size
    stem = config.model.stem
    if stem == "auto":
        stem = "cifar" if image_size <= CIFAR_STEM_UP_TO else "imagenet"
    num_classes = config.model.num_classes or layout.num_classes
    if num_classes < layout.num_classes:
        raise RequestError(
            f"--num_classes={num_classes}",
            f"dataset has {layout.num_classes} classes but --num_classes is {num_classes}",
            "leave it out or raise it",
        )
    notes = [f"{config.model.arch}, {num_classes} classes, {image_size} pixels, {stem} stem"]
    if num_classes > layout.num_classes:
        notes.append(f"warning: --num_classes={num_classes}, but the data has {layout.num_classes} classes")
    model = replace(config.model, stem=stem, num_classes=num_classes)
    return replace(config, model=model, data=replace(config.data, image_size=image_size)), notes


def _choose_precision(config: TrainConfig) -> tuple[TrainConfig, list[str]]:
    precision, device_type, notes = config.precision, config.distributed.device, []
    if precision.opt_level == "auto":
        fast = has_fast_half(device_type, default_half_type(device_type))
        precision = replace(precision, opt_level="O1" if fast or precision.half_type else "O0")
        if precision.opt_level == "O0":
            notes.append("this CPU has no bfloat16 instructions, so auto is O0; --opt_level=O1 is slower here")
    level = resolve_level(precision, device_type)
    if level.name != "O0":
        # A run that is continued on another kind of device keeps its type.
        half = str(level.compute_type).removeprefix("torch.")
        precision = replace(precision, half_type=half)
        if not has_fast_half(device_type, level.compute_type):
            notes.append(f"warning: this CPU is slower in {half} than in float32, so {level.name} is slower than O0")
    engine, engine_note = choose_engine(precision, device_type)
    layout = str(memory_format(precision, device_type)).removeprefix("torch.")
    notes.append(f"precision {level}; by {engine}{f' ({engine_note})' if engine_note else ''}, memory format {layout}")
    if level.name == "O3":
        notes.append("O3 is a reference for speed: without float32 weights a network may not converge")
    return replace(config, precision=replace(precision, amp_engine=engine)), notes


def _complete_data(
    config: TrainConfig, layout: DataLayout, num_ranks: int, world_size: int
) -> tuple[TrainConfig, list[str]]:
    """Loader processes: what was asked, but not more than the cores that each rank has. Synthetic images: enough."""
    data, notes = config.data, []
    if layout.kind in ("folder", "records"):
        asked, cores = (MAX_WORKERS if data.workers is None else data.workers), len(os.sched_getaffinity(0))
        data = replace(data, workers=min(asked, cores // num_ranks))
        notes.append(f"loader workers: {data.workers} per rank ({asked} asked, {cores} cores for {num_ranks} ranks)")
    else:
        data = replace(data, workers=0)
    if layout.kind == "synthetic" and data.synthetic_images is None:
        global_batch = data.batch_size * config.schedule.accumulation_steps * world_size
        data = replace(data, synthetic_images=SYNTHETIC_GLOBAL_BATCHES * global_batch)
    return replace(config, data=data), notes


def _check_norms_have_values(config: TrainConfig) -> None:
    """Batch norms need more than one value a channel to train."""
    if config.model.fine_tuning:  # all of them keep their statistics
        return
    stride = 8 if config.model.stem == "cifar" else 32
    if config.data.batch_size == 1 and config.data.image_size <= stride:
        raise RequestError(
            "--batch_size=1",
            f"leaves one value a channel to the last batch norms at {config.data.image_size} pixels",
            "take at least 2 images per rank, or larger images",
        )


def new_head(config: TrainConfig) -> Literal["never", "if needed", "always"]:
    """When the last layer of --pretrained is replaced by a new one."""
    if config.run.evaluate:
        return "never"
    return "always" if config.model.fine_tuning else "if needed"


def _check_network(config: TrainConfig, plan: RunPlan) -> list[str]:
    """Builds the network without memory and reads the file that it starts from.

    Returns:
        A line for each thing that is not as it was in the run that is continued.
    """
    with torch.device("meta"):
        network = build_resnet(
            config.model.arch,
            config.model.num_classes,
            stem=config.model.stem,
            width_multiplier=config.model.width_multiplier,
        )
    if config.model.freeze:
        freeze(network, config.model.freeze)
    build_optimizer(network, config.optim, plan.peak_lr)  # its library may be missing
    if config.run.pretrained:
        weights, subject = read_weights(config.run.pretrained), f"--pretrained={config.run.pretrained}"
        load_weights(network, weights, subject, new_head(config))
    if not config.run.resume:
        return []
    checkpoint = read_checkpoint(config.run.resume)
    if checkpoint["num_classes"] != config.model.num_classes:
        raise RequestError(
            f"--resume={config.run.resume}",
            f"checkpoint has {checkpoint['num_classes']} classes, data has {config.model.num_classes}",
            "take the weights by --pretrained",
        )
    load_weights(network, checkpoint["model"], f"--resume={config.run.resume}")
    if not config.run.evaluate and resumed_step(checkpoint, plan) >= plan.total_steps:
        raise RequestError(
            f"--resume={config.run.resume}",
            f"has done its {plan.total_steps} steps",
            "raise --epochs or --max_steps to train on",
        )
    saved, now = checkpoint["config"], to_plain(config)
    for section, name in KEPT:
        was, is_now = saved[section].get(name, now[section][name]), now[section][name]
        if was != is_now and not config.run.evaluate:
            raise RequestError(
                f"--resume={config.run.resume}",
                f"{name} was {was} in its run and is {is_now}: the optimizer's state does not fit",
                f"keep --{name}, or take the weights by --pretrained",
            )
    differences = [
        f"{name} was {saved[section][name]}, is {value}"
        for section in ("model", "data", "optim", "schedule", "precision")
        for name, value in now[section].items()
        if name != "workers" and saved[section].get(name, value) != value
    ]
    for name, value in to_plain(plan).items():
        if name in ("world_size", "global_batch_size", "peak_lr") and checkpoint["plan"][name] != value:
            differences.append(f"{name} was {checkpoint['plan'][name]}, is {value}")
    return [f"not as in the run that is continued: {difference}" for difference in differences]
