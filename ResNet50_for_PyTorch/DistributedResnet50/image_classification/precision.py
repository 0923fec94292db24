"""Mixed precision: the two engines that put a network on a level, and the only importer of apex.

torch does it by autocast and GradScaler, with master weights of ours; Apex does it where it is installed. Both keep the
same weights and loss scales, so a checkpoint moves between them. The levels themselves are in levels.py.
"""

import copy
import importlib.metadata
import importlib.util
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor, nn

from image_classification.config import PrecisionConfig
from image_classification.levels import Level, Scaling, resolve_level
from mmcls.utils.device import make_grad_scaler, saturates
from mmcls.utils.errors import RequestError
from mmcls.utils.norms import NORM_TYPES

APEX_SCALING = Scaling(2.0**16, 2.0, 2000, 1.0)


def memory_format(config: PrecisionConfig, device_type: str) -> torch.memory_format:
    """Of images and weights; channels-last unless told otherwise, but not on NPUs, which do not document it."""
    channels_last = device_type != "npu" if config.channels_last is None else config.channels_last
    return torch.channels_last if channels_last else torch.contiguous_format


@cache
def apex_problem() -> str | None:
    """Why Apex cannot do mixed precision here; None where it can."""
    spec = importlib.util.find_spec("apex")
    if spec is None:
        return "apex is not installed"
    try:
        version = importlib.metadata.version("apex")
    except importlib.metadata.PackageNotFoundError:
        version = "unknown version"
    parts = {path.stem for folder in spec.submodule_search_locations or () for path in Path(folder).iterdir()}
    if "amp" not in parts:
        if "optimizers" in parts:
            return f"apex {version} has no amp, which NVIDIA removed in May 2025; see README"
        return f"found a different package called apex ({version}); see README"
    try:
        from apex.amp import initialize, load_state_dict, master_params, scale_loss, state_dict  # noqa: F401
    except Exception as error:  # noqa: BLE001 - one that was built for another torch fails in any way
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"apex {version} cannot be imported here ({reason}); see README"
    return None


def choose_engine(config: PrecisionConfig, device_type: str) -> tuple[Literal["apex", "torch"], str | None]:
    """Who does mixed precision, and a line that says what else was found.

    Raises:
        RequestError: `--amp_engine=apex` where Apex cannot do it.
    """
    level = resolve_level(config, device_type)
    if config.amp_engine == "torch" or (config.amp_engine == "auto" and level.name == "O0"):
        return "torch", None
    problem = apex_problem()
    if problem is None and device_type == "cpu":
        problem = "Apex needs a card"
    if problem is None and level.compute_type == torch.bfloat16:
        problem = "Apex computes in float16"
    if problem is None and level.scaling[:3] != APEX_SCALING[:3]:
        problem = "Apex starts at 65536 and knows the factor 2 and 2000 updates alone"
    if problem is None:
        return "apex", None
    if config.amp_engine == "apex":
        raise RequestError("--amp_engine=apex", problem, "take --amp_engine=torch")
    return "torch", None if problem == "apex is not installed" else problem


def make_precision(
    config: PrecisionConfig, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
) -> "Precision":
    """Puts a network and its optimizer on a level. To be called once, before the network is wrapped.

    Args:
        config: `opt_level` and `amp_engine` are not `auto` any more.
        module: float32, on its device, with the weights to start from.
        optimizer: of its trainable parameters; `Precision.optimizer` takes its place.
    """
    engine = ApexPrecision if config.amp_engine == "apex" else Precision
    return engine(resolve_level(config, device.type), module, optimizer, device)


def _cast(module: nn.Module, parameter_type: torch.dtype, norm_type: torch.dtype) -> None:
    """Casts the parameters and floating buffers in place; norms have a type of their own."""
    for part in module.modules():
        dtype = norm_type if isinstance(part, NORM_TYPES) else parameter_type
        for parameter in part.parameters(recurse=False):
            parameter.data = parameter.data.to(dtype)
        for name, buffer in part.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(part, name, buffer.to(dtype))


class Precision:
    """What the training step asks of a level, done by torch.

    Attributes:
        level: the row of the table.
        optimizer: steps the float32 master weights where there are some, else the network's own weights.
        skipped_updates: updates that an overflow left out since the run was started.
        skips_in_a_row: of these, the last ones without an update between them.
    """

    combines_gradients = False
    """Whether the gradients lie in one buffer that must stay where it is."""
    unscales_each_pass = False
    """Whether every backward pass of a step ends with gradients of its own, which the ranks must average at once."""

    def __init__(self, level: Level, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self.level, self._module, self._device_type = level, module, device.type
        # Without weights of its own, and free of what an engine does to the network that it trains.
        bare = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
        bare |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
        self._skeleton = copy.deepcopy(module, bare).eval()
        self.skipped_updates = self.skips_in_a_row = self._updates = 0
        names = {parameter: name for name, parameter in module.named_parameters()}
        self._names = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        copies = {name: p.detach().clone() for name, p in module.named_parameters() if level.master_weights}
        self.optimizer = self._set_up(module, optimizer, device)
        # Float32 copies of short weights: the masters, and the frozen weights that no optimizer holds.
        short = {name for name, parameter in module.named_parameters() if parameter.dtype != torch.float32}
        self._float32 = {name: value for name, value in copies.items() if name in short}
        self._pairs = self._make_masters(self.optimizer)
        # Neither scaler says whether it skipped; the optimizer's own hook does, without a read of the device.
        self.optimizer.register_step_post_hook(self._count_update)

    def _set_up(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device
    ) -> torch.optim.Optimizer:
        """Casts the network and makes the scaler; returns the optimizer to use."""
        scale, factor, interval, _ = self.level.scaling
        if self.level.loss_scale != "dynamic":
            scale = self.level.loss_scale
        self._scale_at_least = scale
        self._scaler = make_grad_scaler(
            device,
            scale,
            enabled=self.scales_loss,
            growth_factor=factor,
            backoff_factor=1 / factor,
            growth_interval=interval,
        )
        _cast(module, self.level.parameter_type, self.level.norm_type)
        return optimizer

    def _make_masters(self, optimizer: torch.optim.Optimizer) -> list[tuple[nn.Parameter, nn.Parameter]]:
        """Puts master weights in the place of short ones in the optimizer; returns the pairs (short, master)."""
        names, pairs = iter(self._names), []
        for group in optimizer.param_groups:
            for place, (parameter, name) in enumerate(zip(list(group["params"]), names)):
                if name in self._float32:
                    group["params"][place] = nn.Parameter(self._float32[name])
                    pairs.append((parameter, group["params"][place]))
        return pairs

    def _count_update(self, *_) -> None:
        self._updates += 1

    @property
    def scales_loss(self) -> bool:
        return self.level.loss_scale != 1.0

    @property
    def skips_overflows(self) -> bool:
        """Whether a loss that is not finite costs one update; else the run has diverged."""
        return self.scales_loss

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        """The logits, [N, K], in the level's compute type, from images, [N, 3, H, W], float32."""
        with torch.autocast(self._device_type, dtype=self.level.compute_type, enabled=self.level.autocast):
            return model(images.to(self.level.parameter_type))

    def infer(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        """The logits, [N, K], float32, of the network in evaluation mode with the given weights and buffers."""
        with torch.autocast(self._device_type, enabled=False):
            return torch.func.functional_call(self._skeleton, weights, (images,), strict=True)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        """Adds the gradients of the scaled loss; `last` marks the last micro-batch of a step."""
        self._scaler.scale(loss).backward()

    def unscale(self) -> None:
        """Brings the gradients to the optimizer's parameters, free of the loss scale. Once a step, after backward."""
        if self._pairs:
            short = [parameter.grad for parameter, _ in self._pairs]
            for _, master in self._pairs:
                master.grad = torch.empty_like(master)
            torch._foreach_copy_([master.grad for _, master in self._pairs], short)
            for parameter, _ in self._pairs:
                parameter.grad = None
        self._scaler.unscale_(self.optimizer)

    def clip_gradients(self, max_norm: float) -> None:
        """Scales the unscaled gradients so that the norm of all together is at most `max_norm`."""
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        nn.utils.clip_grad_norm_(parameters, max_norm)

    def step(self) -> bool:
        """Applies the update, unless an overflow was found, and adapts the loss scale. After `unscale`.

        The gradients are already averaged over the ranks, so an overflow on one is there on all, and all skip together.

        Returns:
            False where the update was skipped.
        """
        before = self._updates
        self._apply()
        updated = self._updates > before
        self.skipped_updates += not updated
        self.skips_in_a_row = 0 if updated else self.skips_in_a_row + 1
        return updated

    @torch.no_grad()
    def _apply(self) -> None:
        before = self._updates
        self._scaler.step(self.optimizer)
        if self.level.loss_scale != "dynamic":
            self._scaler.update(self.level.loss_scale)
        else:
            self._scaler.update()
        if self._updates == before:
            self._keep_above_floor()
        elif self._pairs:
            short, masters = zip(*self._pairs, strict=True)
            torch._foreach_copy_(list(short), list(masters))

    def _keep_above_floor(self) -> None:
        """After an overflow. The device is read only where the scale, which grows unseen, may have come to the floor."""
        if self.level.loss_scale == "dynamic":
            self._scale_at_least /= self.level.scaling.factor
            if self._scale_at_least < self.level.scaling.smallest:
                self._scale_at_least = max(self.loss_scale, self.level.scaling.smallest)
                self._scaler.update(self._scale_at_least)

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def weights(self) -> dict[str, Tensor]:
        """The network's weights and buffers in float32, by name: the masters where there are some."""
        state = self._module.state_dict() | {name: value.detach() for name, value in self._float32.items()}
        return {name: value.float() if value.is_floating_point() else value for name, value in state.items()}

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 where there is none. Reads the device where the scale lives there."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict:
        """The loss scale and its growth counter, as torch's GradScaler names them; empty where there is none."""
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict) -> str | None:
        """Takes the state of any engine's scaler; a static scale stays what it is.

        Returns:
            A line where a scale is needed and the state has none.
        """
        if self.level.loss_scale != "dynamic":
            return None
        if "scale" not in state:
            return f"the checkpoint has no loss scale: it starts at {self.loss_scale:g}"
        self._load_scale(state)
        return None

    def _load_scale(self, state: dict) -> None:
        self._scaler.load_state_dict(self._scaler.state_dict() | state)
        self._scale_at_least = state["scale"]


class ApexPrecision(Precision):
    """The same by `apex.amp`, which patches the network and the optimizer that it is given."""

    def _set_up(self, module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        from apex import amp

        self._amp, level, options = amp, self.level, {}
        # An overflow of an earlier micro-batch would be forgotten: scale_loss clears the flag of such a chip.
        self.unscales_each_pass = level.loss_scale == "dynamic" and saturates(device)
        if level.name in ("O2", "O3"):
            options["keep_batchnorm_fp32"] = level.norm_type == torch.float32
            options["master_weights"] = level.master_weights
        # Apex combines gradients at O1 and O2 on NPUs alone, and at O2 only those of master weights.
        combines = level.name == "O1" or (level.name == "O2" and level.master_weights)
        self.combines_gradients = combines and device.type == "npu" and type(optimizer) is torch.optim.SGD
        if self.combines_gradients:
            from apex.optimizers import NpuFusedSGD

            optimizer = NpuFusedSGD(optimizer.param_groups, **_sgd_defaults(optimizer))
            options["combine_grad"] = True
        amp.initialize(models=module, optimizers=optimizer, opt_level=level.name, loss_scale=level.loss_scale,
                       min_loss_scale=level.scaling.smallest, verbosity=0, **options)  # fmt: skip
        return optimizer

    @property
    def skips_overflows(self) -> bool:
        return self.level.loss_scale == "dynamic"  # it looks for none with a static scale

    def forward(self, model: nn.Module, images: Tensor) -> Tensor:
        return model(images)

    def infer(self, weights: dict[str, Tensor], images: Tensor) -> Tensor:
        # O1 patches torch's functions for everyone; the other levels change the trained network alone.
        with self._amp.disable_casts() if self.level.autocast else nullcontext():
            return super().infer(weights, images)

    def backward(self, loss: Tensor, last: bool = True) -> None:
        delay = not last and not self.unscales_each_pass
        with self._amp.scale_loss(loss=loss, optimizers=self.optimizer, delay_unscale=delay) as scaled:
            scaled.backward()

    @torch.no_grad()
    def _make_masters(self, optimizer: torch.optim.Optimizer) -> list:
        """Gives Apex's masters, which it makes of short weights, the float32 weights that the run starts from."""
        if self._float32:
            optimizer.zero_grad()  # makes them; later, momentum that is loaded first would be rounded
            for name, master in zip(self._names, self._amp.master_params(optimizer), strict=True):
                if name in self._float32:
                    self._float32[name] = master.copy_(self._float32[name])
        return []

    def unscale(self) -> None:
        """Apex has done it at the end of `backward`."""

    def clip_gradients(self, max_norm: float) -> None:
        if self.combines_gradients:
            self.optimizer.clip_optimizer_grad_norm_fused(max_norm=max_norm)
        else:
            super().clip_gradients(max_norm)

    def _apply(self) -> None:
        self.optimizer.step()

    def zero_gradients(self) -> None:
        self.optimizer.zero_grad()  # Apex's takes no argument
        if not self.combines_gradients:
            # Apex would put zeros aside and add them later, but DistributedDataParallel writes into that memory.
            self._module.zero_grad(set_to_none=True)

    @property
    def loss_scale(self) -> float:
        return float(self._amp.state_dict()["loss_scaler0"]["loss_scale"])

    def state_dict(self) -> dict:
        if not self.scales_loss:
            return {}
        state = self._amp.state_dict()["loss_scaler0"]
        # With a static scale Apex counts without end, and from a number above 2000 no scale would ever grow.
        good_steps = int(state["unskipped"]) if self.level.loss_scale == "dynamic" else 0
        growth = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": APEX_SCALING.growth_interval}
        return {"scale": float(state["loss_scale"]), **growth, "_growth_tracker": good_steps}

    def _load_scale(self, state: dict) -> None:
        scaler = {"loss_scale": state["scale"], "unskipped": state.get("_growth_tracker", 0)}
        self._amp.load_state_dict({"loss_scaler0": scaler})


def _sgd_defaults(optimizer: torch.optim.SGD) -> dict:
    return {name: optimizer.defaults[name] for name in ("lr", "momentum", "dampening", "weight_decay", "nesterov")}
