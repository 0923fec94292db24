"""What can be known before any rank is started: devices, precision, numbers, checkpoints. A wrong request ends here."""

import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from image_classification.checkpoint import load_weights, read_checkpoint, read_weights, resumed_step
from image_classification.config import RunConfig, RunPlan, TrainConfig, resolve, to_plain
from image_classification.data import DataLayout, absolute_path, check_loaders, open_datasets, prepare_data
from image_classification.precision import memory_format
from image_classification.resnet import build_resnet
from mmcls.utils.device import (
    BACKENDS,
    auto_select_device,
    check_npu_mask,
    device_count,
    has_fast_half,
    visible_cards_text,
)
from mmcls.utils.distribution import npu_distributed_data_parallel, started_as_rank
from mmcls.utils.errors import RequestError
from mmcls.utils.hccl_environment import prepare_hccl_environment

DEFAULT_OUTPUT = Path(__file__).resolve().parents[3] / "test" / "output"
CIFAR_STEM_UP_TO = 64
SYNTHETIC_GLOBAL_BATCHES = 100
MAX_WORKERS = 8


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
    """

    config: TrainConfig
    layout: DataLayout
    cards: tuple[int, ...]
    num_ranks: int
    notes: tuple[str, ...]
    plan: RunPlan
    started_at: float
    handover: Path | None = None


def prepare_job(config: TrainConfig, layout: DataLayout, started_at: float) -> Job:
    """Checks a request against this machine and the data, and fills in what was left open.

    Raises:
        RequestError: it cannot be carried out.
    """
    config, cards, num_ranks, notes = _choose_devices(config)
    _check_backend(config)
    layout = prepare_data(layout)
    if layout.kind == "synthetic" and config.model.num_classes:
        layout = replace(layout, num_classes=config.model.num_classes)
    if layout.path is not None:  # absolute, so that a resumed run finds it from anywhere
        config = replace(config, data=replace(config.data, data_path=str(absolute_path(config.data.data_path))))
    config, model_notes = _complete_model(config, layout)
    config, precision_notes = _choose_precision(config)
    world_size = int(os.environ["WORLD_SIZE"]) if started_as_rank() else num_ranks * config.distributed.world_size
    config, data_notes = _complete_data(config, layout, num_ranks, world_size)
    datasets = open_datasets(layout, config.data, config.data.image_size)
    plan = resolve(config, world_size, len(datasets.train), len(datasets.val))
    limit_notes = check_loaders(datasets.train, config.data, num_ranks)
    _check_output(config)
    if not config.run.evaluate:
        _check_norms_have_values(config)
    weight_notes = _check_weights(config, plan)
    lr_source = "--lr" if config.optim.lr is not None else f"{config.optim.lr_per_256:g} per 256 images"
    notes += [layout.description, *layout.warnings, *datasets.warnings]
    notes += [
        *model_notes,
        *precision_notes,
        *data_notes,
        *limit_notes,
        plan.batch_line,
        f"learning rate {plan.peak_lr:g} ({lr_source})",
        *weight_notes,
    ]
    notes.append(f"{plan.num_train_images} training images in {plan.steps_per_epoch} steps an epoch, "
                 f"{plan.left_out_images} left out by each epoch's order; {plan.num_val_images} validation images")  # fmt: skip
    return Job(config, layout, cards, num_ranks, tuple(notes), plan, started_at)


def _choose_devices(config: TrainConfig) -> tuple[TrainConfig, tuple[int, ...], int, list[str]]:
    distributed, notes = config.distributed, []
    if started_as_rank():  # torchrun has decided how many there are
        started = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        if distributed.nproc_per_node not in (None, started) or distributed.world_size > 1:
            raise RequestError(
                "--nproc_per_node and --world_size", f"torchrun has started {started} ranks here", "leave them out"
            )
        distributed = replace(distributed, nproc_per_node=started)
    if distributed.simulate_npu and distributed.device not in ("auto", "npu"):
        raise RequestError("--simulate_npu", f"does not fit --device={distributed.device}", "leave --device out")
    device_type = "npu" if distributed.simulate_npu else distributed.device
    if device_type == "auto":
        device_type = auto_select_device()
    if device_type == "npu":
        check_npu_mask()
    visible = device_count(device_type)
    if device_type == "cpu":
        if distributed.gpu is not None:
            raise RequestError(f"--gpu={distributed.gpu}", "there is no card here", "leave --gpu out to run on the CPU")
        if distributed.multiprocessing_distributed:
            raise RequestError(
                "--multiprocessing_distributed", "there is no card here", "give the ranks by --nproc_per_node"
            )
        cards, num_ranks = (), distributed.nproc_per_node or 1
        if distributed.device == "auto":
            notes.append(f"no accelerator: {num_ranks} rank{'s' * (num_ranks > 1)} on the CPU")
    elif visible == 0:
        raise RequestError(
            f"--device={device_type}", f"there are no cards: {visible_cards_text(device_type)}", "take --device=cpu"
        )
    else:
        cards = _choose_cards(distributed.gpu, distributed.nproc_per_node,
                              distributed.multiprocessing_distributed, device_type, visible)  # fmt: skip
        num_ranks = len(cards)
        if started_as_rank() and num_ranks != distributed.nproc_per_node:
            raise RequestError(
                f"--gpu={distributed.gpu}",
                f"{num_ranks} cards for the {distributed.nproc_per_node} ranks that torchrun started",
                "give as many",
            )
    if device_type == "npu" and num_ranks * distributed.world_size > 1:
        npu_distributed_data_parallel()
        notes += prepare_hccl_environment(choose_ports=not started_as_rank())
    return replace(config, distributed=replace(distributed, device=device_type)), cards, num_ranks, notes


def _choose_cards(
    gpu: str | None, nproc: int | None, all_cards: bool, device_type: str, visible: int
) -> tuple[int, ...]:
    if gpu is not None:
        ids = [part.strip() for part in gpu.split(",")]
        cards = tuple(int(part) for part in ids if part.isascii() and part.isdecimal())
        if len(set(cards)) < len(ids):
            raise RequestError(f"--gpu={gpu}", "is not a list of card numbers", "write --gpu=0 or --gpu=0,1,2")
        flag = f"--gpu={gpu}"
    else:
        cards = tuple(range(visible if all_cards else nproc or 1))
        flag = f"--nproc_per_node={nproc}"
    if len(cards) > visible or max(cards) >= visible:
        asked = f"{len(cards)} devices asked" if len(cards) > visible else f"card {max(cards)} asked"
        raise RequestError(
            flag, f"{asked}, {visible_cards_text(device_type)}", f"take --gpu with ids below {visible}, or --device=cpu"
        )
    return cards


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


def _check_backend(config: TrainConfig) -> None:
    device, backend = config.distributed.device, config.distributed.dist_backend
    fitting = BACKENDS[device]
    if backend not in (None, fitting) and not (device == "cuda" and backend == "gloo"):
        raise RequestError(f"--dist_backend={backend}", f"does not fit {device}", f"take {fitting} or leave it out")


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
    precision, device = config.precision, torch.device(config.distributed.device)
    level, notes = precision.opt_level, []
    if level == "auto":
        level = "O1" if has_fast_half(device) else "O0"
        if level == "O0":
            notes.append(
                "this CPU has no bfloat16 instructions: O0 is used; --opt_level=O1 forces O1, which is slow here"
            )
    layout = str(memory_format(precision, device.type)).removeprefix("torch.")
    notes.append(f"precision {level}, memory format {layout}")
    return replace(config, precision=replace(precision, opt_level=level)), notes


def _complete_data(
    config: TrainConfig, layout: DataLayout, num_ranks: int, world_size: int
) -> tuple[TrainConfig, list[str]]:
    """Loader processes: what was asked, but not more than the cores that each rank has. Synthetic images: enough."""
    data, notes = config.data, []
    if layout.kind == "folder":
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
    stride = 8 if config.model.stem == "cifar" else 32
    if config.data.batch_size == 1 and config.data.image_size <= stride:
        raise RequestError(
            "--batch_size=1",
            f"leaves one value a channel to the last batch norms at {config.data.image_size} pixels",
            "take at least 2 images per rank, or larger images",
        )


def _check_weights(config: TrainConfig, plan: RunPlan) -> list[str]:
    """Reads the file that the run starts from; says what is not as it was in the run that is continued."""
    with torch.device("meta"):
        network = build_resnet(
            config.model.arch,
            config.model.num_classes,
            stem=config.model.stem,
            width_multiplier=config.model.width_multiplier,
        )
    if config.run.pretrained:
        weights, subject = read_weights(config.run.pretrained), f"--pretrained={config.run.pretrained}"
        load_weights(network, weights, subject, new_head=not config.run.evaluate)
    if not config.run.resume:
        return []
    checkpoint = read_checkpoint(config.run.resume)
    if checkpoint["num_classes"] != config.model.num_classes:
        raise RequestError(
            f"--resume={config.run.resume}",
            f"checkpoint has {checkpoint['num_classes']} classes, data has {config.model.num_classes}",
            "take the weights by --pretrained",
        )
    load_weights(network, checkpoint["model"], f"--resume={config.run.resume}", new_head=False)
    if not config.run.evaluate and resumed_step(checkpoint, plan) >= plan.total_steps:
        raise RequestError(
            f"--resume={config.run.resume}",
            f"has done its {plan.total_steps} steps",
            "raise --epochs or --max_steps to train on",
        )
    saved, now = checkpoint["config"], to_plain(config)
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
