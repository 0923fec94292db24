"""Mixed precision: the one place that knows types and loss scales, and the only importer of apex.

| level | parameters | norms   | compute  | default loss scale                    |
| ----- | ---------- | ------- | -------- | ------------------------------------- |
| O0    | float32    | float32 | float32  | 1                                     |
| O1    | float32    | float32 | autocast | dynamic with float16, 1 with bfloat16 |

The levels are rows of this table (Micikevicius et al. 2018 for the technique), not branches of the training step.
"""

from contextlib import AbstractContextManager

import torch

from image_classification.config import PrecisionConfig
from mmcls.utils.device import half_type, make_grad_scaler


def memory_format(config: PrecisionConfig, device_type: str) -> torch.memory_format:
    """Of images and weights; channels-last unless told otherwise, but not on NPUs, which do not document it."""
    channels_last = device_type != "npu" if config.channels_last is None else config.channels_last
    return torch.channels_last if channels_last else torch.contiguous_format


class Precision:
    """What the training step asks of a level.

    Args:
        config: the level.
        optimizer: the optimizer that `step` applies.
        device: the device of the parameters.
    """

    def __init__(self, config: PrecisionConfig, optimizer: torch.optim.Optimizer, device: torch.device):
        self._device_type = device.type
        self._optimizer = optimizer
        self._autocast = config.opt_level == "O1"
        self.compute_type = half_type(device) if self._autocast else torch.float32
        self._scaler = make_grad_scaler(device, enabled=self.compute_type == torch.float16)
        self._updates = 0
        # GradScaler.step does not say whether it skipped; the optimizer's own hook does, without a read of the device.
        optimizer.register_step_post_hook(self._count_update)

    def _count_update(self, *_) -> None:
        self._updates += 1

    def autocast(self) -> AbstractContextManager:
        """The context in which the forward pass runs."""
        return torch.autocast(self._device_type, dtype=self.compute_type, enabled=self._autocast)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradients of the scaled loss."""
        self._scaler.scale(loss).backward()

    def step(self) -> bool:
        """Unscales the gradients and applies the update.

        The gradients are already summed over the ranks, so an overflow on one is there on all, and all skip together.

        Returns:
            False where an overflow made it skip the update; the loss scale is lowered then.
        """
        before = self._updates
        self._scaler.step(self._optimizer)
        self._scaler.update()
        return self._updates > before

    @property
    def loss_scale(self) -> float:
        """The current loss scale; 1 where there is none. Reads the device where the scale lives there."""
        return self._scaler.get_scale()

    def state_dict(self) -> dict:
        return self._scaler.state_dict()

    def load_state_dict(self, state: dict) -> None:
        """Takes the state of a scaler of either kind; torch_npu's has an entry that torch's lacks."""
        if state and self._scaler.is_enabled():
            self._scaler.load_state_dict(self._scaler.state_dict() | state)
