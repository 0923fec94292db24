"""`apex.amp`: `initialize`, `scale_loss`, `disable_casts`, `state_dict`, `load_state_dict` and `master_params`.

Like the real one it patches the objects it is given and keeps one state for the process. Unlike it, a second
`initialize`, a step on gradients that are still scaled and gradients that have left their combined buffer are errors
instead of wrong numbers.
"""

import contextlib
import itertools
from collections import OrderedDict
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.modules.batchnorm import _BatchNorm
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from apex._optimizer import Stash, calls
from apex._scaler import LossScaler

__all__ = [
    "calls",
    "disable_casts",
    "initialize",
    "load_state_dict",
    "master_params",
    "reset",
    "scale_loss",
    "state_dict",
]

_OPTIONS = ("cast_model_type", "patch_torch_functions", "keep_batchnorm_fp32", "master_weights", "loss_scale")
_LEVELS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}
# Of the real one's lists, what image classifiers call.
_PATCHED = {
    torch.conv2d: torch.float16,
    F.linear: torch.float16,
    torch.matmul: torch.float16,
    F.softmax: torch.float32,
    F.log_softmax: torch.float32,
    F.cross_entropy: torch.float32,
}
_state = None  # of the process, from `initialize` on


def reset():
    """Forgets the state and the calls, so that a test may initialize again; the real one has no such function."""
    global _state
    if _state is not None and _state.patches is not None:
        _state.patches.__exit__(None, None, None)
    _state = None
    calls.clear()


class _Patches(TorchFunctionMode):
    """O1: torch's functions cast what they are given, for every caller."""

    casts = True

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.casts and function in _PATCHED:
            args, kwargs = _cast((args, kwargs), _PATCHED[function])
        return function(*args, **kwargs)


@dataclass
class _State:
    enabled: bool
    verbosity: int = 1
    master_weights: bool = False
    scalers: tuple[LossScaler, ...] = ()
    patches: _Patches | None = None


def _options(opt_level, **overrides):
    """The options of a level with those that the caller gave."""
    if opt_level not in _LEVELS:
        raise RuntimeError(f"Unexpected optimization level {opt_level}. Options are 'O0', 'O1', 'O2', 'O3'.")
    given = {name: value for name, value in overrides.items() if value is not None}
    if opt_level == "O1":
        if given.get("cast_model_type") not in (None, False, torch.float32):
            raise RuntimeError("O1 inserts casts around Torch functions: cast_model_type should remain float32")
        for name in ("keep_batchnorm_fp32", "master_weights"):
            if name in given:
                raise RuntimeError(f"With opt_level O1, {name} should be None.")
    elif given.get("patch_torch_functions"):
        raise RuntimeError("patch_torch_functions=True should only be set by selecting opt_level='O1'.")
    if (given.get("combine_grad") or given.get("check_combined_tensors")) and opt_level not in ("O1", "O2"):
        raise RuntimeError("combine_grad=True or check_combined_tensors=True belong to opt_level='O1' or 'O2'.")
    if "keep_batchnorm_fp32" in given:
        keep = {"True": True, "False": False}.get(given["keep_batchnorm_fp32"], given["keep_batchnorm_fp32"])
        assert isinstance(keep, bool), f"keep_batchnorm_fp32 must be a boolean or its text, found {keep}"
        given["keep_batchnorm_fp32"] = keep
    if given.get("loss_scale", "dynamic") != "dynamic":
        given["loss_scale"] = float(given["loss_scale"])
    return dict(zip(_OPTIONS, _LEVELS[opt_level], strict=True)) | {"combine_grad": False} | given


def _check_model(model):
    is_wrapped = isinstance(model, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel))
    if is_wrapped:
        name = type(model).__name__
        raise RuntimeError(f"Incoming model is an instance of {name}. Apply parallel wrappers AFTER amp.initialize.")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float32 or tensor.device.type not in ("npu", "cuda"):
            found = f"{tensor.dtype} on {tensor.device}"
            raise RuntimeError(f"Found {name} with type {found}, expected torch.float32 on an accelerator.")


def _check_optimizer(optimizer, opt_level, options):
    if hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
    fused = getattr(optimizer, "is_npu_fused_optimizer", False)
    if fused and opt_level not in ("O1", "O2"):
        raise RuntimeError("npu fused optimizer can only be used when opt_level='O1' or opt_level='O2'")
    if (fused or options["combine_grad"]) and opt_level == "O2" and options["master_weights"] is not True:
        raise RuntimeError("With opt_level O2, master_weights should be True when combine_grad is True or fused")


def _cast(value, dtype):
    """`value` with every floating-point tensor in it of type `dtype`; unchanged where that is None."""

    def cast(leaf):
        is_number = isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.device.type != "cpu"
        return leaf.to(dtype) if is_number else leaf

    return value if dtype is None else tree_map(cast, value)


def _patch_forward(model, input_type, output_type):
    forward = model.forward  # stays that of this model in a deep copy, as in the real one

    def patched(*args, **kwargs):
        return _cast(forward(*_cast(args, input_type), **_cast(kwargs, input_type)), output_type)

    model.forward = patched


def _cast_model(model, dtype, keep_norms):
    for module in model.modules():
        if keep_norms and isinstance(module, _BatchNorm) and module.affine:
            continue
        for tensor in itertools.chain(module.parameters(recurse=False), module.buffers(recurse=False)):
            if tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
    model.register_state_dict_post_hook(_half_to_float)


def _half_to_float(module, state_dict, prefix, local_metadata):
    for name, value in state_dict.items():
        if isinstance(value, torch.Tensor) and value.dtype == torch.float16:
            state_dict[name] = value.float()


def initialize(
    models,
    optimizers=None,
    enabled=True,
    opt_level="O1",
    cast_model_type=None,
    patch_torch_functions=None,
    keep_batchnorm_fp32=None,
    master_weights=None,
    loss_scale=None,
    cast_model_outputs=None,
    num_losses=1,
    verbosity=1,
    min_loss_scale=None,
    max_loss_scale=2.0**24,
    combine_grad=None,
    check_combined_tensors=None,
):
    """Casts and patches models and optimizers in place; gives them back as they came, alone or in lists."""
    global _state
    overrides = {
        "cast_model_type": cast_model_type,
        "patch_torch_functions": patch_torch_functions,
        "keep_batchnorm_fp32": keep_batchnorm_fp32,
        "master_weights": master_weights,
        "loss_scale": loss_scale,
        "combine_grad": combine_grad,
        "check_combined_tensors": check_combined_tensors,
    }
    others = {"opt_level": opt_level, "enabled": enabled, "min_loss_scale": min_loss_scale}
    calls.append(("initialize", others | overrides))
    if _state is not None:
        raise RuntimeError("amp.initialize should only be called once.")
    if not enabled:
        _state = _State(enabled=False)
        return models if optimizers is None else (models, optimizers)
    options = _options(opt_level, **overrides)
    every_model = models if isinstance(models, list) else [models]
    every_optimizer = optimizers if isinstance(optimizers, list) else [optimizers] if optimizers is not None else []
    for model in every_model:
        _check_model(model)
    for optimizer in every_optimizer:
        _check_optimizer(optimizer, opt_level, options)
    device = next(every_model[0].parameters()).device
    if options["combine_grad"] and device.type != "npu":
        raise RuntimeError(f"combine_grad is for NPUs; the parameters are on {device}")

    for model in every_model:
        if options["cast_model_type"]:
            _cast_model(model, options["cast_model_type"], options["keep_batchnorm_fp32"])
            _patch_forward(model, options["cast_model_type"], cast_model_outputs or torch.float32)
        elif cast_model_outputs is not None:
            _patch_forward(model, None, cast_model_outputs)
    for optimizer in every_optimizer:
        if options["cast_model_type"]:
            optimizer.load_state_dict(optimizer.state_dict())  # casts it to the parameters' type
        Stash(optimizer, options["master_weights"], options["combine_grad"])

    limits = (min_loss_scale, max_loss_scale)
    scalers = tuple(LossScaler(options["loss_scale"], *limits, device.type) for _ in range(num_losses))
    patches = _Patches() if options["patch_torch_functions"] else None
    _state = _State(True, verbosity, bool(options["master_weights"]), scalers, patches)
    if patches is not None:
        patches.__enter__()
    return models if optimizers is None else (models, optimizers)


@contextlib.contextmanager
def scale_loss(loss, optimizers, loss_id=0, model=None, delay_unscale=False, delay_overflow_check=False):
    """Gives the scaled loss; at the end unscales the gradients, and on overflow makes the next step do nothing."""
    calls.append(("scale_loss", {"delay_unscale": delay_unscale}))
    if _state is None:
        raise RuntimeError("Invoked 'with amp.scale_loss`, but internal Amp state has not been initialized.")
    if not _state.enabled:
        yield loss
        return
    scaler = _state.scalers[loss_id]
    if not _state.master_weights and not scaler.dynamic and scaler.loss_scale == 1.0:
        yield loss.float()
        return
    every_optimizer = optimizers if isinstance(optimizers, list) else [optimizers]
    stashes = [optimizer._amp_stash for optimizer in every_optimizer]
    if not delay_unscale:
        for stash in stashes:
            stash.prepare_backward()
    scaler.clear_flag()  # in every backward pass: what overflowed in an earlier one of a group is forgotten
    yield loss.float() * scaler.loss_scale
    if delay_unscale:
        for stash in stashes:
            stash.has_scaled_gradients = True
        return
    overflow = scaler.read_flag()
    for stash in stashes:
        overflow |= stash.unscale(scaler.loss_scale, scaler.looks_for_infinity, skip=overflow)
    if delay_overflow_check:
        return
    scaler.update(overflow)
    if overflow:
        for stash in stashes:
            stash.skip_next_step(scaler.loss_scale, _state.verbosity)


@contextlib.contextmanager
def disable_casts():
    """Functions as they were before O1 patched them; fails at the other levels, as the real one does."""
    if _state is None or _state.patches is None:
        raise AttributeError("'AmpState' object has no attribute 'handle'")
    _state.patches.casts = False
    yield
    _state.patches.casts = True


def state_dict(destination=None):
    """The scale of each loss scaler and the good steps since it changed; no master weights."""
    calls.append(("state_dict", {}))
    destination = OrderedDict() if destination is None else destination
    for number, scaler in enumerate(_state.scalers):
        destination[f"loss_scaler{number}"] = {"loss_scale": scaler.loss_scale, "unskipped": scaler.unskipped}
    return destination


def load_state_dict(state_dict):
    calls.append(("load_state_dict", dict(state_dict)))
    if unexpected := [name for name in state_dict if "loss_scaler" not in name]:
        raise RuntimeError(f"Error(s) in loading state_dict. Unexpected key(s) in state_dict: {unexpected}")
    if len(state_dict) != len(_state.scalers):
        print(f"Warning: state_dict contains {len(state_dict)} entries, while {len(_state.scalers)} are used")
    for scaler, saved in zip(_state.scalers, state_dict.values(), strict=False):
        scaler.loss_scale, scaler.unskipped = saved["loss_scale"], saved["unskipped"]


def master_params(optimizer):
    """The parameters that the optimizer steps: until their first use the model's, then the float32 masters."""
    for group in optimizer.param_groups:
        yield from group["params"]
