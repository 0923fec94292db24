"""The optimizer and what weight decay applies to."""

import torch
from torch import nn

from image_classification.config import OptimConfig
from mmcls.utils.norms import NORM_TYPES


def build_optimizer(model: nn.Module, config: OptimConfig, lr: float) -> torch.optim.SGD:
    """Builds SGD with momentum over every parameter of the model, in two groups.

    The first group has weight decay, the second, of norms and biases, has none (He et al. 2019, arXiv:1812.01187,
    section 3.1). Norms are found by the type of their module, so those of the shortcuts are among them.

    Args:
        model: the network; parameters that several modules share are taken once.
        config: momentum, Nesterov and weight decay.
        lr: first learning rate of both groups; training sets `group["lr"]` before each step.
    """
    decay, no_decay, seen = [], [], set()
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter in seen:
                continue
            seen.add(parameter)
            exempt = isinstance(module, NORM_TYPES) or name.endswith("bias")
            (no_decay if exempt else decay).append(parameter)
    return torch.optim.SGD(
        [{"params": decay, "weight_decay": config.weight_decay}, {"params": no_decay, "weight_decay": 0.0}],
        lr=lr,
        momentum=config.momentum,
        nesterov=config.nesterov,
    )
