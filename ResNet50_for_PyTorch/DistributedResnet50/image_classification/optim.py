"""The optimizer and what weight decay applies to."""

import torch
from torch import nn

from image_classification.config import OptimConfig
from mmcls.utils.errors import RequestError
from mmcls.utils.norms import NORM_TYPES


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> torch.optim.Optimizer:
    """Builds SGD with momentum, or LARS, over every parameter of the model that is not frozen, in two groups.

    The first group has weight decay, the second, of norms and biases, has none (He et al. 2019, arXiv:1812.01187,
    section 3.1). Norms are found by the type of their module, so those of the shortcuts are among them.

    LARS (You et al. 2017, arXiv:1708.03888, algorithm 1) multiplies the gradient and weight decay of each tensor of the
    first group by 0.001 |w| / (|g| + weight decay |w|), and is SGD for the second. As in torch's SGD, and unlike there,
    the learning rate multiplies the momentum and is not part of it; the two differ where the rate changes.

    Args:
        model: the network; parameters that several modules share are taken once.
        config: kind, momentum, Nesterov and weight decay.
        lr: first learning rate of both groups; training sets `group["lr"]` before each step.

    Raises:
        RequestError: LARS is asked for and timm, which has it, is not there.
    """
    decay, no_decay, seen = [], [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen or not parameter.requires_grad:
                continue
            seen.add(parameter)
            exempt = isinstance(module, NORM_TYPES) or name.endswith("bias")
            (no_decay if exempt else decay).append(parameter)
    groups = [{"params": decay, "weight_decay": config.weight_decay}, {"params": no_decay, "weight_decay": 0.0}]
    options = {"lr": lr, "momentum": config.momentum, "nesterov": config.nesterov}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, **options)
    groups[0]["always_adapt"] = True  # without weight decay too
    return _lars()(groups, trust_coeff=0.001, **options)


def _lars() -> type[torch.optim.Optimizer]:
    try:
        from timm.optim import Lars  # here, as it takes a second
    except ImportError as error:
        raise RequestError("--optimizer=lars", f"needs the package timm ({error})", "pip install timm") from error
    return Lars
