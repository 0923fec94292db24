"""`torch.npu.amp.GradScaler`: loss scaling that also works where half precision saturates."""

from collections import defaultdict

import torch
import torch.distributed as dist
from torch.amp.grad_scaler import OptState, _refresh_per_optimizer_state

from torch_npu.npu.utils import clear_npu_overflow_flag, is_support_inf_nan


class GradScaler(torch.amp.GradScaler):
    """The Ascend scaler: its state has a `dynamic` entry, and it reads the device in every step.

    On chips that saturate it clears the overflow flag before the first `scale`
    of a step, and all ranks agree on the flag by a sum. A stock scaler's state
    does not load into it: KeyError.
    """

    def __init__(
        self,
        init_scale=2.0**16,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=2000,
        dynamic=True,
        enabled=True,
    ):
        super().__init__("npu", init_scale, growth_factor, backoff_factor, growth_interval, enabled)
        self._dynamic = dynamic
        self._has_overflow = False
        self._flag_is_fresh = False

    def scale(self, outputs):
        if self._enabled and self._dynamic and not self._flag_is_fresh:
            if not is_support_inf_nan():
                clear_npu_overflow_flag()
            self._flag_is_fresh = True
        return super().scale(outputs)

    def unscale_(self, optimizer):
        if not self._enabled:
            return
        self._check_scale_growth_tracker("unscale_")
        state = self._per_optimizer_states[id(optimizer)]
        if state["stage"] is OptState.UNSCALED:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update().")
        if state["stage"] is OptState.STEPPED:
            raise RuntimeError("unscale_() is being called after step().")
        found_inf = torch.zeros((), dtype=torch.float32, device=self._scale.device)
        self._unscale(optimizer, self._scale.float().reciprocal(), found_inf)
        state["found_inf_per_device"] = {found_inf.device: found_inf}
        state["stage"] = OptState.UNSCALED

    @torch.no_grad()
    def _unscale(self, optimizer, inverse_scale, found_inf):
        gradients = defaultdict(list)
        for gradient in self._gradients(optimizer):
            gradients[gradient.dtype].append(gradient)
        for of_one_type in gradients.values():
            if self._dynamic:
                torch._amp_foreach_non_finite_check_and_unscale_(of_one_type, found_inf, inverse_scale)
                self._has_overflow |= found_inf.item() > 0
            else:
                torch._foreach_mul_(of_one_type, inverse_scale)
        if self._dynamic and not is_support_inf_nan() and dist.is_initialized():
            overflows = torch.full((1,), float(self._has_overflow), device=found_inf.device)
            dist.all_reduce(overflows)
            self._has_overflow = overflows.item() > 0
        found_inf.add_(float(self._has_overflow))

    @staticmethod
    def _gradients(optimizer):
        if hasattr(optimizer, "is_fused_optimizer"):
            optimizer._maybe_init_combined_params_and_grads()
            yield from (gradient for gradient in optimizer.grads_all_group_combined if gradient is not None)
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.dtype == torch.float16:
                    raise TypeError("Attempting to unscale FP16 gradients.")
                yield parameter.grad

    def _maybe_opt_step(self, optimizer, optimizer_state, *args, **kwargs):
        if self._dynamic and self._has_overflow:
            print("Gradient overflow. Skipping step")
            return None
        return optimizer.step(*args, **kwargs)

    def update(self, new_scale=None):
        if not self._enabled:
            return
        scale, tracker = self._check_scale_growth_tracker("update")
        if new_scale is not None:
            self._scale = torch.as_tensor(new_scale, dtype=torch.float32, device=scale.device)
        elif self._dynamic and self._has_overflow:
            scale.mul_(self._backoff_factor)
            tracker.zero_()
            print(f"Loss scaler reducing loss scale to {scale.item()}")
        elif self._dynamic:
            tracker.add_(1)
            if tracker.item() == self._growth_interval:
                grown = scale * self._growth_factor
                self._scale = scale if torch.isinf(grown) else grown
                tracker.zero_()
                print(f"Loss scaler increasing loss scale to {self._scale.item()}")
        self._per_optimizer_states = defaultdict(_refresh_per_optimizer_state)
        self._has_overflow = False
        self._flag_is_fresh = False

    def state_dict(self):
        state = super().state_dict()
        return {**state, "dynamic": self._dynamic} if self._enabled else state

    def load_state_dict(self, state_dict):
        if not self._enabled:
            return
        super().load_state_dict(state_dict)
        self._dynamic = state_dict["dynamic"]

    @staticmethod
    def get_npu_overflow_flag():
        return torch.npu.get_npu_overflow_flag()

    @staticmethod
    def clear_npu_overflow_flag():
        clear_npu_overflow_flag()
