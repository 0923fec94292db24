"""The command line: from arguments to a `TrainConfig`.

tyro turns the typed sections into options and values. Around it stands what the ModelZoo guides expect and tyro does
not do: aliases, `--flag=True`, one error line that names the nearest option, and limits of the numbers.
"""

import contextlib
import dataclasses
import difflib
import io
import os
import typing
from collections.abc import Iterator, Sequence

import tyro

from image_classification.checkpoint import read_checkpoint, saved_config
from image_classification.config import DistributedConfig, PrecisionConfig, RunConfig, TrainConfig
from image_classification.data import DataLayout, detect_layout
from image_classification.recipes import recipe
from mmcls.utils.errors import RequestError

ALIASES = {
    "data": "data_path",
    "b": "batch_size",
    "a": "arch",
    "learning_rate": "lr",
    "j": "workers",
    "p": "print_freq",
    "wd": "weight_decay",
    "warmup_epochs": "warmup",
    "e": "evaluate",
    "device_list": "gpu",
}
SYNONYMS = ("addr", "amp", "precision_mode", "static_loss_scale", "dynamic_loss_scale", "local_rank")
"""Names of the ModelZoo's scripts that stand for another option with a value; `_canonical` says which."""
PRECISION_MODES = {"must_keep_origin_dtype": "O0", "allow_mix_precision": "O2"}
DEFAULT_PORT = 29500
BOOLEANS = ("true", "false")
SCHEDULE_OF = {"milestones": "step", "gamma": "step", "power": "polynomial"}
LARGEST, LARGEST_OF = 10**9, {"seed": 2**63, "resident_bytes": 2**63, "lr": 1e38}

# Smallest allowed values; `>` where the value itself is not allowed.
LIMITS = {
    "batch_size": ">=1", "image_size": ">=1", "workers": ">=0", "resident_bytes": ">=0",
    "cutout": ">=0", "prefetch": ">=0", "data_timeout": ">0", "synthetic_images": ">=1", "num_classes": ">=1",
    "width_multiplier": ">0", "lr": ">=0", "lr_per_256": ">=0", "momentum": ">=0", "weight_decay": ">=0",
    "label_smoothing": ">=0", "epochs": ">=1", "max_steps": ">=1", "warmup": ">=0", "recipe_warmup": ">=0", "gamma": ">0",
    "accumulation_steps": ">=1", "nproc_per_node": ">=1", "world_size": ">=1", "rank": ">=0", "dist_timeout": ">0",
    "no_augment_epochs": ">=0", "mixup": ">=0", "cutmix": ">=0", "clip_grad_norm": ">0", "ema_decay": ">=0", "power": ">0",
    "init_loss_scale": ">=1", "loss_scale_factor": ">1", "loss_scale_growth_interval": ">=1", "min_loss_scale": ">=1",
    "seed": ">=0", "print_freq": ">=1", "throughput_warmup_steps": ">=0",
}  # fmt: skip


def parse(argv: Sequence[str]) -> tuple[TrainConfig, DataLayout]:
    """Parses the arguments (without the program's name) and looks at the data they name.

    Parsed twice: the first pass finds what the defaults of the second come from, the recipe that fits the data or,
    with --resume, the run that is continued.

    Raises:
        RequestError: an unknown option, a bad value or data that is not there.
        SystemExit: 0 after `--help`.
    """
    options = list(_options(argv))
    given = _parse_values(options, TrainConfig())
    if given.run.resume:
        config = _parse_values(options, _continued(given.run.resume, dict(options)))
        layout = detect_layout(config.data.data_path, config.data.allow_empty_classes)
    else:
        # The check names empty classes itself, after it has read everything else.
        layout = detect_layout(given.data.data_path, given.data.allow_empty_classes or given.run.check_data)
        config = _parse_values(options, recipe(given.run.recipe, layout.kind, layout.small_images))
    _check(config)
    for name, schedule in SCHEDULE_OF.items():
        if name in dict(options) and config.schedule.schedule != schedule:
            raise RequestError(f"--{name}", f"belongs to --schedule={schedule}", "leave it out")
    return config, layout


def _continued(path: str, options: dict[str, str]) -> TrainConfig:
    """The configuration of the run that a checkpoint is from, less what belongs to that machine and command.

    On another level than the saved one its options mean nothing, with another short type its loss scale.
    """
    saved = saved_config(read_checkpoint(path), path)
    same = options.get("opt_level") in (None, saved.precision.opt_level)
    precision = saved.precision if same else PrecisionConfig()
    if options.get("half_type") not in (None, precision.half_type):
        precision = dataclasses.replace(precision, loss_scale=None)
    precision = dataclasses.replace(precision, channels_last=saved.precision.channels_last, amp_engine="auto")
    run = RunConfig(recipe=saved.run.recipe, seed=saved.run.seed, print_freq=saved.run.print_freq)
    return dataclasses.replace(
        saved,
        data=dataclasses.replace(saved.data, workers=None),
        precision=precision,
        distributed=DistributedConfig(),
        run=run,
    )


def _fields() -> dict[str, type]:
    """The type of each option by its name, over all sections."""
    return {
        name: hint
        for section in typing.get_type_hints(TrainConfig).values()
        for name, hint in typing.get_type_hints(section).items()
    }


def _options(argv: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Splits arguments into (option, value) pairs with canonical names; a flag without value is `True`."""
    fields = _fields()
    remaining = list(argv)
    while remaining:
        token = remaining.pop(0)
        if token in ("-h", "--help"):
            tyro.cli(TrainConfig, args=["--help"], config=(tyro.conf.OmitArgPrefixes,), use_underscores=True)
        if not token.startswith("-"):
            raise RequestError(token, "not an option", "write --option=value; --help lists the options")
        written, has_value, value = token.partition("=")
        name = written.lstrip("-").replace("-", "_")
        name = ALIASES.get(name, name)
        if not has_value and name not in fields and _is_flag(fields.get(name.removeprefix("no_"))):
            yield name.removeprefix("no_"), "False"
            continue
        takes_no_value = name in ("amp", "dynamic_loss_scale") or _is_flag(fields.get(name))
        if not has_value and takes_no_value:
            value = remaining.pop(0) if remaining and remaining[0].lower() in BOOLEANS else "True"
        elif not has_value:
            if name not in {*fields, *SYNONYMS}:
                raise _unknown(written, name, fields)
            if not remaining or remaining[0].startswith("--"):
                raise RequestError(written, "needs a value", f"write {written}=VALUE")
            value = remaining.pop(0)
        yield from _canonical(written, name, value, fields)


def _canonical(written: str, name: str, value: str, fields: dict[str, type]) -> Iterator[tuple[str, str]]:
    if not value.strip() or value == "None":
        raise RequestError(f"{written}={value.strip()}", "the value is empty", "give a value or leave the option out")
    if name == "addr":
        yield "dist_url", f"tcp://{value}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}"
    elif name in ("amp", "dynamic_loss_scale"):
        if value.lower() not in BOOLEANS:
            raise RequestError(f"{written}={value}", "not a valid value", "take True or False")
        if name == "amp":
            yield "opt_level", "O2" if value.lower() == "true" else "O0"
        elif value.lower() == "true":
            yield "loss_scale", "dynamic"
        else:
            raise RequestError(f"{written}={value}", "leaves the scale open", "give it by --static_loss_scale=N")
    elif name == "static_loss_scale":
        yield "loss_scale", value
    elif name == "precision_mode":
        if value not in PRECISION_MODES:
            raise RequestError(f"{written}={value}", "unknown mode", f"take {' or '.join(PRECISION_MODES)}")
        yield "opt_level", PRECISION_MODES[value]
    elif name == "local_rank":
        # Older launchers pass it beside the environment variable; the variable is what counts.
        if os.environ.get("LOCAL_RANK") != value:
            raise RequestError(f"{written}={value}", "LOCAL_RANK is not set to it", "start by torchrun or a launcher")
    elif name in fields:
        yield name, value
    else:
        raise _unknown(written, name, fields)


def _is_flag(hint: type | None) -> bool:
    """Whether an option of this type needs no value: True, False or, for some, undecided."""
    return hint is bool or bool in typing.get_args(hint)


def _unknown(written: str, name: str, fields: dict[str, type]) -> RequestError:
    names = {other: f"--{other}" for other in (*fields, *ALIASES, *SYNONYMS) if len(other) > 1}
    nearest = difflib.get_close_matches(name, names, n=1, cutoff=0.0)
    return RequestError(written, "unknown option", f"did you mean {names[nearest[0]]}? --help lists the options")


def _parse_values(options: Sequence[tuple[str, str]], default: TrainConfig) -> TrainConfig:
    fields = _fields()
    arguments = {}
    for name, value in options:
        arguments[name] = _tyro_arguments(name, value, fields[name])
    try:
        return _tyro(sum(arguments.values(), []), default)
    except SystemExit:
        for name, value in options:
            try:
                _tyro(arguments[name], default)
            except SystemExit:
                raise RequestError(f"--{name}={value}", "not a valid value", _expected(name, fields[name])) from None
        raise


def _tyro(arguments: list[str], default: TrainConfig) -> TrainConfig:
    # tyro's boxes of several lines are dropped: one line of ours says which option it was.
    with contextlib.redirect_stderr(io.StringIO()), contextlib.redirect_stdout(io.StringIO()):
        return tyro.cli(TrainConfig, args=arguments, default=default, config=(tyro.conf.OmitArgPrefixes,))


def _tyro_arguments(name: str, value: str, hint: type) -> list[str]:
    option = "--" + name.replace("_", "-")
    if _is_flag(hint):
        flags = {"true": [option], "false": [option.replace("--", "--no-", 1)]}
        if hint is not bool:
            flags = {text: [f"{option}={text.capitalize()}"] for text in BOOLEANS}
        if value.lower() not in flags:
            raise RequestError(f"--{name}={value}", "not a valid value", "take True or False")
        return flags[value.lower()]
    if typing.get_origin(hint) is tuple:
        return [option, *value.replace(",", " ").split()]
    return [f"{option}={value}"]


def _expected(name: str, hint: type) -> str:
    choices = [choice for part in (hint, *typing.get_args(hint)) for choice in typing.get_args(part)]
    if typing.Literal in {typing.get_origin(part) for part in (hint, *typing.get_args(hint))}:
        return "take " + ", ".join(str(choice) for choice in choices if isinstance(choice, str))
    kinds = {int: "a whole number", float: "a number", bool: "True or False"}
    for kind, text in kinds.items():
        if kind in (hint, *typing.get_args(hint)):
            return f"take {text}"
    return f"see --help for --{name}"


def _check(config: TrainConfig) -> None:
    """Refuses numbers outside their limits and options that contradict each other."""
    values = {
        item.name: getattr(section, item.name)
        for section in (getattr(config, field.name) for field in dataclasses.fields(config))
        for item in dataclasses.fields(section)
    }
    for name, limit in LIMITS.items():
        value, bound = values[name], float(limit.lstrip(">="))
        if value is not None and not (value >= bound if ">=" in limit else value > bound):
            raise RequestError(f"--{name}={value}", f"must be {limit}", "change it")
        if value is not None and value >= LARGEST_OF.get(name, LARGEST):
            raise RequestError(f"--{name}={value}", "is too large", "change it")
    if config.optim.label_smoothing >= 1:
        raise RequestError(f"--label_smoothing={config.optim.label_smoothing}", "must be below 1", "change it")
    if config.optim.ema_decay is not None and config.optim.ema_decay >= 1:
        raise RequestError(f"--ema_decay={config.optim.ema_decay}", "must be below 1", "change it")
    if config.data.batch_size == 1 and (config.data.mixup or config.data.cutmix):
        raise RequestError("--batch_size=1", "leaves --mixup and --cutmix nothing to mix with", "take at least 2")
    if config.data.no_augment_epochs > config.schedule.epochs:
        raise RequestError(
            f"--no_augment_epochs={config.data.no_augment_epochs}",
            f"there are {config.schedule.epochs} epochs",
            "take fewer",
        )
    if config.model.fine_tuning and config.model.freeze:
        raise RequestError("--freeze", "--fine_tuning freezes all but the last layer", "give one of them")
    if config.model.fine_tuning and not (config.run.pretrained or config.run.resume):
        raise RequestError("--fine_tuning", "there are no weights to start from", "give --pretrained=PATH")
    if config.optim.nesterov and config.optim.momentum == 0:
        raise RequestError("--nesterov", "needs momentum", "give --momentum, or leave --nesterov out")
    if not all(milestone > 0 for milestone in config.schedule.milestones):
        raise RequestError("--milestones", "must be epochs above 0", "change them")
    if config.run.resume and config.run.pretrained:
        raise RequestError("--pretrained", "given together with --resume", "give one of them")
    if config.run.evaluate and not (config.run.resume or config.run.pretrained):
        raise RequestError("--evaluate", "there are no weights to validate", "give --resume=PATH or --pretrained=PATH")
    if config.distributed.rank >= config.distributed.world_size:
        raise RequestError(
            f"--rank={config.distributed.rank}",
            f"there are {config.distributed.world_size} machines (--world_size), numbered from 0",
            "give each machine its own number",
        )
