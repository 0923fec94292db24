"""The levels of mixed precision as one table, and what options make of its rows.

| level | parameters | norms   | compute  | master weights | default loss scale                    |
| ----- | ---------- | ------- | -------- | -------------- | ------------------------------------- |
| O0    | float32    | float32 | float32  | no             | 1                                     |
| O1    | float32    | float32 | autocast | no             | dynamic with float16, 1 with bfloat16 |
| O2    | half       | float32 | half     | float32        | dynamic with float16, 1 with bfloat16 |
| O3    | half       | half    | half     | no             | 1                                     |

They mean what Apex's documentation says (Micikevicius et al. 2018, arXiv:1710.03740, for the technique).
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from image_classification.config import PrecisionConfig
from mmcls.utils.device import default_half_type, supports_bfloat16
from mmcls.utils.errors import RequestError

SMALLEST_SCALE, LARGEST_SCALE = 1.0, 2.0**24
# level: (weights are short, norms are short, autocast, master weights)
LEVELS = {
    "O0": (False, False, False, False),
    "O1": (False, False, True, False),
    "O2": (True, False, False, True),
    "O3": (True, True, False, False),
}


class Scaling(NamedTuple):
    """How a dynamic loss scale moves."""

    first: float
    factor: float
    growth_interval: int
    smallest: float


@dataclass(frozen=True)
class Level:
    """A row of the table, with what options and device make of it.

    Attributes:
        compute_type: of convolutions and of the logits.
        parameter_type: of the weights that the network holds.
        norm_type: of norms' weights and statistics.
        loss_scale: a number, or `dynamic`.
        scaling: of a dynamic one.
    """

    name: str
    compute_type: torch.dtype
    parameter_type: torch.dtype
    norm_type: torch.dtype
    autocast: bool
    master_weights: bool
    loss_scale: float | Literal["dynamic"]
    scaling: Scaling

    def __str__(self) -> str:
        names = [str(t).removeprefix("torch.") for t in (self.parameter_type, self.norm_type, self.compute_type)]
        masters = ", float32 master weights" if self.master_weights else ""
        scale = self.loss_scale if self.loss_scale == "dynamic" else f"{self.loss_scale:g}"
        return f"{self.name}: weights {names[0]}, norms {names[1]}, compute {names[2]}{masters}, loss scale {scale}"


def resolve_level(config: PrecisionConfig, device_type: str) -> Level:
    """The row that `config` asks for, on a device type.

    Raises:
        RequestError: options that contradict the level or the device; the rule is in the text.
    """
    name = config.opt_level
    short_weights, short_norms, autocast, masters = LEVELS[name]
    half = _half_type(config, device_type)
    if config.keep_batchnorm_fp32 is not None or config.master_weights is not None:
        if not short_weights:
            flag = "--keep_batchnorm_fp32" if config.keep_batchnorm_fp32 is not None else "--master_weights"
            raise RequestError(flag, f"belongs to O2 and O3; the weights of {name} are float32", "leave it out")
        short_norms = short_norms if config.keep_batchnorm_fp32 is None else not config.keep_batchnorm_fp32
        masters = masters if config.master_weights is None else config.master_weights
    compute_type = half if name != "O0" else torch.float32
    return Level(
        name=name,
        compute_type=compute_type,
        parameter_type=half if short_weights else torch.float32,
        norm_type=half if short_norms else torch.float32,
        autocast=autocast,
        master_weights=masters,
        loss_scale=_loss_scale(config, compute_type, can_unscale=masters or not short_weights),
        scaling=Scaling(
            config.init_loss_scale, config.loss_scale_factor, config.loss_scale_growth_interval, config.min_loss_scale
        ),
    )


def _half_type(config: PrecisionConfig, device_type: str) -> torch.dtype:
    if config.half_type is None:
        return default_half_type(device_type)
    subject = f"--half_type={config.half_type}"
    if config.opt_level == "O0":
        raise RequestError(subject, "O0 computes in float32", "leave it out, or take --opt_level=O1, O2 or O3")
    if config.half_type == "bfloat16" and not supports_bfloat16(device_type):
        raise RequestError(subject, f"this {device_type} does not compute in it", "take --half_type=float16")
    return getattr(torch, config.half_type)


def _loss_scale(config: PrecisionConfig, compute_type: torch.dtype, can_unscale: bool) -> float | Literal["dynamic"]:
    needed = compute_type == torch.float16
    if config.loss_scale is None:
        if not needed or config.opt_level == "O3":
            return 1.0
        if not can_unscale:
            raise RequestError(
                "--master_weights=False", "leaves nothing to unscale float16 gradients in", "add --loss_scale=1"
            )
        return "dynamic"
    subject = f"--loss_scale={config.loss_scale}"
    scale = parse_loss_scale(config.loss_scale)
    if scale != 1.0 and not needed:
        name = "O0 computes in float32" if compute_type == torch.float32 else "bfloat16 has the range of float32"
        raise RequestError(subject, f"{name} and needs no loss scale", "leave it out")
    if scale != 1.0 and not can_unscale:
        raise RequestError(
            subject, "float16 gradients cannot be unscaled without float32 weights", "add --master_weights, or take 1"
        )
    return scale


def parse_loss_scale(text: str) -> float | Literal["dynamic"]:
    """Reads the value of `--loss_scale`.

    Raises:
        RequestError: it is neither `dynamic` nor a number from 1 to 2**24, Apex's largest.
    """
    if text == "dynamic":
        return "dynamic"
    try:
        scale = float(text)
    except ValueError:
        scale = 0.0
    if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
        raise RequestError(f"--loss_scale={text}", "must be `dynamic` or from 1 to 16777216", "change it")
    return scale
