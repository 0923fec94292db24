"""Training that has left the finite numbers: when that was, and where in the network."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from mmcls.utils.distribution import min_over_ranks

NEVER = torch.iinfo(torch.int64).max


class FirstBadStep:
    """Remembers, on the device, the first step whose loss is not finite; only `read` makes the host wait.

    Args:
        device: device of the losses.
    """

    def __init__(self, device: torch.device | str):
        self._first = torch.full((), NEVER, device=device)
        self._loss = torch.zeros((), device=device)

    @torch.no_grad()
    def add(self, loss: Tensor, step: int) -> None:
        """Looks at a loss, a scalar on the device."""
        # The step is filled in on the device; torch.tensor(step, device=...) would copy from the host and wait for it.
        candidate = torch.full_like(self._first, step).masked_fill_(loss.isfinite(), NEVER)
        self._loss = torch.where(candidate < self._first, loss, self._loss)
        self._first = torch.minimum(self._first, candidate)

    def read(self) -> tuple[int, str] | None:
        """The first bad step of any rank so far and its loss there; None where all losses were finite.

        All ranks call it together. Where the loss was bad on other ranks only, it is called `not finite`.
        """
        first = int(min_over_ranks(self._first.clone()))
        if first == NEVER:
            return None
        own = int(self._first) == first
        return first, f"{float(self._loss)}" if own else "not finite"


def first_non_finite(module: nn.Module, loss_function: Callable[[], Tensor]) -> str | None:
    """Names the first tensor that is not finite, in the order of one forward and backward pass.

    A diagnosis, slow and for a run that ends: it reads from the device for every tensor. Parameters' `grad` stays as
    it is, while norms in training mode take in one more batch.

    Args:
        module: the network itself, without a wrapper.
        loss_function: runs the network, wrapped or not, and returns the loss as backward would take it, scaled.

    Returns:
        `weight NAME`, `statistic NAME`, `images`, `output of MODULE`, `loss` or `gradient of NAME`; None where all
        are finite.
    """
    for kind, tensors in (("weight", module.named_parameters()), ("statistic", module.named_buffers())):
        if name := non_finite_of(dict(tensors)):
            return f"{kind} {name}"
    bad_output, loss = _run_watched(module, loss_function)
    if bad_output:
        return bad_output
    if not _is_finite(loss):
        return "loss"
    return _first_bad_gradient(module, loss)


def non_finite_of(tensors: dict[str, Tensor]) -> str | None:
    """The name of the first tensor that is not finite, by one read of the device; None where all are."""
    finite = torch.stack([tensor.detach().isfinite().all() for tensor in tensors.values()]).tolist() if tensors else []
    return next((name for name, good in zip(tensors, finite, strict=True) if not good), None)


def _run_watched(module: nn.Module, loss_function: Callable[[], Tensor]) -> tuple[str | None, Tensor]:
    """Runs a forward pass; the first output of a layer that is not finite, if any, and the loss."""
    found, started = [], False
    layers = {name: layer for name, layer in module.named_modules() if next(layer.children(), None) is None}

    # At once and not at the end: the next layer may work in place.
    def look(name: str, _layer: nn.Module, inputs: tuple, output: Tensor) -> None:
        nonlocal started
        if not started and not all(map(_is_finite, inputs)):
            found.append("images")
        elif not found and not _is_finite(output):
            found.append(f"output of {name}")
        started = True

    handles = [layer.register_forward_hook(partial(look, name)) for name, layer in layers.items()]
    try:
        loss = loss_function()
    finally:
        for handle in handles:
            handle.remove()
    return (found[0] if found else None), loss


def _first_bad_gradient(module: nn.Module, loss: Tensor) -> str | None:
    parameters = {
        f"{prefix}.{name}".lstrip("."): parameter
        for prefix, layer in reversed(list(module.named_modules()))
        for name, parameter in layer.named_parameters(recurse=False)
        if parameter.requires_grad
    }
    # Not backward(), which would set off the hooks by which DistributedDataParallel averages over the ranks.
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None and not _is_finite(gradient):
            return f"gradient of {name}"
    return None


def _is_finite(tensor: Tensor) -> bool:
    return bool(tensor.detach().isfinite().all())
