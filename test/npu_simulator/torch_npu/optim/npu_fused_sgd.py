"""`torch_npu.optim.NpuFusedSGD`, with the limits of the real one."""

import torch
from torch.optim.optimizer import Optimizer, required

_DTYPES = (torch.float32, torch.float16)


def _combine(tensors):
    """Moves tensors into one buffer, of which they become views; gives the buffer, or None for no tensors."""
    if not tensors:
        return None
    buffer = torch.cat([tensor.detach().reshape(-1) for tensor in tensors])
    offset = 0
    for tensor in tensors:
        tensor.data = buffer[offset : offset + tensor.numel()].view(tensor.shape)
        offset += tensor.numel()
    return buffer


class NpuFusedSGD(Optimizer):
    """SGD over combined buffers: parameters and gradients move into them at the first step and must stay there.

    A state of `torch.optim.SGD` can be loaded and is what `state_dict` gives. As in the real one, momentum that is
    loaded after the first step is not used: the combined buffer stays.

    Raises:
        ValueError: a setting is out of range.
        TypeError: a parameter is neither float32 nor float16.
    """

    is_fused_optimizer = True

    def __init__(self, params, lr=required, momentum=0.0, dampening=0.0, weight_decay=0.0, nesterov=False):
        if lr is not required and lr < 0.0:
            raise ValueError(f"Invalid learning rate: {lr}")
        if momentum < 0.0:
            raise ValueError(f"Invalid momentum value: {momentum}")
        if weight_decay < 0.0:
            raise ValueError(f"Invalid weight_decay value: {weight_decay}")
        if nesterov and (momentum <= 0.0 or dampening != 0.0):
            raise ValueError("Nesterov momentum requires a momentum and zero dampening")
        defaults = dict(lr=lr, momentum=momentum, dampening=dampening, weight_decay=weight_decay, nesterov=nesterov)
        super().__init__(params, defaults)
        self.is_params_grads_combined = False
        self.params_all_group_combined = [None, None]
        self.grads_all_group_combined = [None, None]
        self._parts = []  # (number of the group, parameters, their slice of the buffer, their gradients' slice)
        self._momentum_buffers = {}  # for each part, from the first step on

    def _maybe_init_combined_params_and_grads(self):
        if self.is_params_grads_combined:
            return
        for number, dtype in enumerate(_DTYPES):
            members = []
            for group in self.param_groups:  # loading a state replaces the groups: refer to them by number
                used = [parameter for parameter in group["params"] if parameter.grad is not None]
                for parameter in used:
                    if parameter.dtype not in _DTYPES:
                        raise TypeError(
                            "Fused optimizer's parameters must be either float32 or float16, "
                            f"but received {parameter.dtype}"
                        )
                members.append([parameter for parameter in used if parameter.dtype == dtype])
            everyone = [parameter for parameters in members for parameter in parameters]
            self.params_all_group_combined[number] = values = _combine(everyone)
            self.grads_all_group_combined[number] = gradients = _combine([p.grad for p in everyone])
            offset = 0
            for group_number, parameters in enumerate(members):
                size = sum(parameter.numel() for parameter in parameters)
                if size:
                    part = slice(offset, offset + size)
                    self._parts.append((group_number, parameters, values[part], gradients[part]))
                offset += size
        self.is_params_grads_combined = bool(self._parts)

    @torch.no_grad()
    def step(self, closure=None):
        loss = closure() if closure is not None else None
        self._maybe_init_combined_params_and_grads()
        for part, (group_number, parameters, values, gradients) in enumerate(self._parts):
            group = self.param_groups[group_number]
            update = gradients.add(values, alpha=group["weight_decay"])
            if group["momentum"]:
                momentum = self._momentum(part, parameters, update, group)
                update = update.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
            values.add_(update, alpha=-group["lr"])
        return loss

    def _momentum(self, part, parameters, update, group):
        if part in self._momentum_buffers:
            return self._decayed(self._momentum_buffers[part], update, group)
        states = [self.state[parameter] for parameter in parameters]
        if all("momentum_buffer" in state for state in states):  # loaded
            buffer = torch.cat([state["momentum_buffer"].reshape(-1) for state in states])
            self._decayed(buffer, update, group)
        else:
            buffer = update.clone()
        pieces = buffer.split([parameter.numel() for parameter in parameters])
        for state, parameter, piece in zip(states, parameters, pieces, strict=True):
            state["momentum_buffer"] = piece.view(parameter.shape)
        self._momentum_buffers[part] = buffer
        return buffer

    @staticmethod
    def _decayed(buffer, update, group):
        return buffer.mul_(group["momentum"]).add_(update, alpha=1 - group["dampening"])

    @torch.no_grad()
    def zero_grad(self, set_to_none=False):
        if set_to_none:
            raise ValueError("set_to_none is not supported in fused optimizers")
        self._maybe_init_combined_params_and_grads()
        for gradients in self.grads_all_group_combined:
            if gradients is not None:
                gradients.zero_()

    @torch.no_grad()
    def clip_grad_norm_fused_(self, max_norm, norm_type=2):
        """Scales all gradients so that their norm is at most `max_norm`; gives the norm before."""
        self._maybe_init_combined_params_and_grads()
        gradients = [gradient for gradient in self.grads_all_group_combined if gradient is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm
