"""`apex.optimizers.NpuFusedSGD`."""

from torch.optim.optimizer import required
from torch_npu import optim

__all__ = ["NpuFusedSGD"]


def _refuse_without_amp(optimizer, args, kwargs):
    if not hasattr(optimizer, "_amp_stash"):
        raise RuntimeError("apex.optimizers.NpuFusedSGD should be used with AMP.")


class NpuFusedSGD(optim.NpuFusedSGD):
    """That of torch_npu, but a state may be loaded at any time, and a step before `amp.initialize` is refused.

    It does not clip: `amp.initialize` gives it `clip_optimizer_grad_norm_fused`.
    """

    is_npu_fused_optimizer = True

    @property
    def clip_grad_norm_fused_(self):
        raise AttributeError("'NpuFusedSGD' object has no attribute 'clip_grad_norm_fused_'")

    def __init__(self, params, lr=required, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
        super().__init__(params, lr, momentum, dampening, weight_decay, nesterov)
        self.register_step_pre_hook(_refuse_without_amp)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._momentum_buffers.clear()
