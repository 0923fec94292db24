"""Checkpoints: written atomically, read strictly, and made of tensors, numbers, strings and containers alone.

A checkpoint holds everything that the next step depends on, so a resumed run equals the uninterrupted one:

    model       weights and buffers in float32, without any wrapper's prefix: the masters where there are some
    ema         the moving average of the same, or None
    optimizer   its state_dict
    precision   the loss scaler's state_dict
    step        optimizer updates done; with the config it gives epoch, learning rate and place in the order
    rng         the seed; every generator is seeded anew each epoch by a function of seed, epoch and rank, and the
                order and the augmentation are functions of seed, epoch and image, so there is no other state
    best        top-1 in percent and epoch of the best validation
    config      the resolved TrainConfig as nested dicts
    plan        the RunPlan: batch sizes, steps an epoch, learning rate
    num_classes, class_names
"""

import difflib
import os
import typing
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from image_classification.config import RunPlan, TrainConfig
from mmcls.utils.errors import RequestError

LAST = "checkpoint_last.pth.tar"
BEST = "model_best.pth.tar"
KEYS = {"model", "optimizer", "step", "rng", "best", "config", "plan", "num_classes", "class_names"}
ABSENT = {"precision": {}, "ema": None}
"""What may be missing in a file of an earlier version, and what stands for it."""
HEAD = ("fc.weight", "fc.bias")


def _on_cpu(value: object) -> object:
    """The value with its tensors on the CPU, so that the file loads on any machine."""
    if isinstance(value, torch.Tensor):
        return value.cpu()
    if isinstance(value, dict):
        return {key: _on_cpu(item) for key, item in value.items()}
    return [_on_cpu(item) for item in value] if isinstance(value, list) else value


def save_checkpoint(contents: dict, path: Path) -> None:
    """Writes a checkpoint beside `path` and renames it, so that `path` is at any moment whole or the earlier one."""
    assert contents.keys() == KEYS | ABSENT.keys(), contents.keys()
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(_on_cpu(contents), file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: str, flag: str) -> object:
    subject = f"{flag}={path}"
    try:
        file = Path(path).expanduser()
        exists = file.exists()
    except (OSError, RuntimeError) as error:
        raise RequestError(subject, f"is no path ({error})", "check it") from error
    if file.is_dir():
        inside = [name for name in (LAST, BEST) if (file / name).exists()]
        raise RequestError(subject, "is a folder", f"give the file{', ' + ' or '.join(inside) if inside else ''}")
    if not exists:
        neighbours = [p.name for p in file.parent.iterdir()] if file.parent.is_dir() else []
        near = difflib.get_close_matches(file.name, neighbours, n=3, cutoff=0.4)
        raise RequestError(subject, "no such file", f"near it are: {', '.join(near)}" if near else "check the path")
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a file that is cut, foreign or hostile
        reason = (str(error).strip() or type(error).__name__).splitlines()[0][:160]
        size = file.stat().st_size
        raise RequestError(
            subject, f"is not a readable checkpoint ({size} bytes: {reason})", "give another file"
        ) from error


def read_checkpoint(path: str, flag: str = "--resume") -> dict:
    """Reads a complete checkpoint.

    Raises:
        RequestError: no such file, not readable, or weights without the rest.
    """
    contents = _read(path, flag)
    if not isinstance(contents, dict) or not contents.keys() >= KEYS:
        raise RequestError(
            f"{flag}={path}", "holds weights only, or is of another program", "take the weights by --pretrained=PATH"
        )
    return ABSENT | contents


def saved_config(checkpoint: dict, path: str) -> TrainConfig:
    """The configuration of a checkpoint.

    Raises:
        RequestError: it has options that this version does not have.
    """
    try:
        return TrainConfig(
            **{
                name: section(
                    **{
                        key: tuple(value) if isinstance(value, list) else value
                        for key, value in checkpoint["config"][name].items()
                    }
                )
                for name, section in typing.get_type_hints(TrainConfig).items()
            }
        )
    except (TypeError, KeyError, AttributeError) as error:
        raise RequestError(
            f"--resume={path}", f"was written by another version ({error})", "resume it with that version"
        ) from error


def read_weights(path: str, flag: str = "--pretrained") -> dict[str, torch.Tensor]:
    """Reads the weights of a checkpoint, of a plain state_dict or of one under `state_dict` or `model`.

    Prefixes that wrappers add (`module.`, any number of times) are removed.

    Raises:
        RequestError: no such file, not readable, or no weights in it.
    """
    contents = _read(path, flag)
    for key in ("model", "state_dict"):
        if isinstance(contents, dict) and isinstance(contents.get(key), dict):
            contents = contents[key]
    is_weights = isinstance(contents, dict) and all(
        isinstance(name, str) and isinstance(value, torch.Tensor) for name, value in contents.items()
    )
    if not is_weights or not contents:
        raise RequestError(f"{flag}={path}", "holds no weights", "give a state_dict or a checkpoint")
    while all(name.startswith("module.") for name in contents):
        contents = {name.removeprefix("module."): value for name, value in contents.items()}
    return contents


def resumed_step(checkpoint: dict, plan: RunPlan) -> int:
    """The step to go on from: with another global batch an epoch has other steps, but the place in the run stays."""
    return checkpoint["step"] * plan.steps_per_epoch // checkpoint["plan"]["steps_per_epoch"]


def load_weights(
    module: nn.Module,
    weights: dict[str, torch.Tensor],
    subject: str,
    new_head: Literal["never", "if needed", "always"] = "never",
) -> str | None:
    """Loads weights strictly.

    Args:
        module: the unwrapped model; on the meta device the weights are checked and nothing is loaded.
        weights: its parameters and buffers by name.
        subject: the flag and path, for error lines.
        new_head: keep the model's own last layer; `if needed`: where the file's has another number of classes.

    Returns:
        A line that says so where the last layer was kept, else None.

    Raises:
        RequestError: names or shapes differ; names the first ones.
    """
    own = module.state_dict()
    # Files from before torch 0.4.1 lack the norms' counters, which nothing here reads.
    weights = {name: value for name, value in own.items() if name.endswith("num_batches_tracked")} | weights
    note = None
    differs = all(name in weights and weights[name].shape != own[name].shape for name in HEAD)
    if new_head == "always" or (new_head == "if needed" and differs):
        note = f"{subject}: {len(weights.get('fc.bias', ()))} classes there, {len(own['fc.bias'])} here: new last layer"
        weights = weights | {name: own[name] for name in HEAD}
    missing, unexpected = sorted(own.keys() - weights.keys()), sorted(weights.keys() - own.keys())
    if missing or unexpected:
        named = [f"{kind} {names[0]} (of {len(names)})" for kind, names in
                 (("missing", missing), ("unexpected", unexpected)) if names]  # fmt: skip
        raise RequestError(subject, ", ".join(named), "check --arch, --stem and --width_multiplier")
    for name, value in weights.items():
        if value.shape != own[name].shape:
            here, there = tuple(own[name].shape), tuple(value.shape)
            raise RequestError(
                subject, f"{name} is {there} there and {here} here", "check --arch, --stem, --num_classes"
            )
    if not all(parameter.is_meta for parameter in module.parameters()):
        module.load_state_dict(weights)
    return note
