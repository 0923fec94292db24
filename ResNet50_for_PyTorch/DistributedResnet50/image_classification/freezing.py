"""Layers that keep what they have learnt: their weights and the statistics of their norms."""

from collections.abc import Sequence

from torch import nn

from mmcls.utils.errors import RequestError
from mmcls.utils.norms import NORM_TYPES

HEAD = "fc"


def freeze(module: nn.Module, names: Sequence[str]) -> None:
    """Freezes parts of a network.

    Args:
        module: the network itself, before the optimizer and any wrapper are made.
        names: modules, as `conv1`, `layer1` or `layer2.0`, each with all that is in it.

    Raises:
        RequestError: a name is no part of the network that has weights, or nothing is left to train.
    """
    parts = {name: part for name, part in module.named_modules() if name and next(part.parameters(), None) is not None}
    for name in names:
        if name not in parts:
            possible = ", ".join(part for part in parts if "." not in part)
            raise RequestError(f"--freeze={name}", "is no part of the network with weights", f"take some of {possible}")
        parts[name].requires_grad_(False)
    if not any(parameter.requires_grad for parameter in module.parameters()):
        raise RequestError(
            f"--freeze={','.join(names)}", "leaves nothing to train", f"leave out a part, such as {HEAD}"
        )


def freeze_all_but_head(module: nn.Module) -> None:
    """Freezes everything but the last layer, `fc`."""
    module.requires_grad_(False)
    module.get_submodule(HEAD).requires_grad_(True)


def train_mode(model: nn.Module) -> None:
    """Sets training mode, but for frozen norms: they keep their statistics and normalise by them."""
    model.train()
    for module in model.modules():
        if isinstance(module, NORM_TYPES):
            parameters = list(module.parameters(recurse=False))
            if parameters and not any(parameter.requires_grad for parameter in parameters):
                module.eval()
