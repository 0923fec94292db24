"""What `amp.initialize` hangs on an optimizer: master weights, unscaling, and steps that may be skipped."""

from types import MethodType

import torch

calls: list[tuple[str, dict]] = []
"""Each call with its details, oldest first: initialize, scale_loss, clip, step, skipped, (load_)state_dict."""


class Stash:
    """`optimizer._amp_stash`; patches the optimizer's `step` and, where gradients stay in place, its `zero_grad`.

    Attributes:
        pairs: model parameter and master parameter, one and the same where there is no master; None until used.
        has_scaled_gradients: whether a backward pass with `delay_unscale` has left scaled gradients.
    """

    def __init__(self, optimizer, master_weights, combine_grad):
        optimizer._amp_stash = self
        self.optimizer = optimizer
        self.master_weights = master_weights
        self.combined = bool(combine_grad) or getattr(optimizer, "is_npu_fused_optimizer", False)
        self.pairs = None
        self.has_scaled_gradients = False
        self._earlier = {}  # gradients that were there before a backward pass, unscaled
        self._buffers = None  # where the combined gradients are
        self._is_skipping = False
        self._step = optimizer.step
        optimizer.step = MethodType(lambda _, closure=None: self._stepped(closure), optimizer)
        if master_weights or self.combined:
            optimizer.zero_grad = MethodType(lambda _: self._zero_grad(), optimizer)
        optimizer._amp_lazy_init = MethodType(lambda _: self._lazy_init(), optimizer)
        optimizer.clip_optimizer_grad_norm_fused = MethodType(self._clip, optimizer)

    def _lazy_init(self):
        """Makes the masters out of the half parameters; takes their place in the optimizer and its state."""
        if self.pairs is not None:
            return
        self.pairs = []
        for group in self.optimizer.param_groups:
            for index, parameter in enumerate(group["params"]):
                if not parameter.requires_grad and (self.master_weights or self.combined):
                    continue
                if parameter.dtype not in (torch.float16, torch.float32):
                    raise TypeError(f"Optimizer's parameters must be float32 or float16. Received {parameter.dtype}")
                master = parameter
                if self.master_weights:
                    if parameter.dtype == torch.float16:
                        master = parameter.detach().clone().float().requires_grad_()
                        group["params"][index] = master
                        if parameter in self.optimizer.state:
                            self.optimizer.state[master] = self.optimizer.state.pop(parameter)
                    master.grad = None  # also that of a float32 parameter that a delayed backward pass has just made
                self.pairs.append((parameter, master))
        if self.master_weights:
            self.optimizer.load_state_dict(self.optimizer.state_dict())  # casts it to the masters' type

    def _clear(self, parameter):
        if self.combined and parameter.grad is not None:
            parameter.grad.zero_()
        else:
            parameter.grad = None

    def _clear_masters(self):
        for parameter, master in self.pairs:
            if master is not parameter:
                self._clear(master)

    def prepare_backward(self):
        """Puts the gradients so far aside; scaled ones are added to by the backward pass that follows."""
        if self.has_scaled_gradients:
            return
        self._lazy_init()
        for parameter, master in self.pairs:
            if master is parameter and parameter.grad is not None:
                self._earlier[parameter] = parameter.grad.clone() if self.combined else parameter.grad
            self._clear(parameter)

    @torch.no_grad()
    def unscale(self, scale, look_for_infinity, skip):
        """Adds the unscaled gradients to the earlier ones unless they have overflowed; whether they have."""
        self._lazy_init()
        self.has_scaled_gradients = False
        earlier, self._earlier = self._earlier, {}
        gradients = [parameter.grad for parameter, _ in self.pairs if parameter.grad is not None]
        if skip or look_for_infinity and not all(gradient.float().sum().isfinite() for gradient in gradients):
            return True
        for parameter, master in self.pairs:
            before = earlier.get(parameter) if master is parameter else master.grad
            if parameter.grad is None:
                master.grad = before
                continue
            total = parameter.grad.to(master.dtype) * (1 / scale)
            if before is not None:
                total += before
            if self.combined and master.grad is not None:
                master.grad.copy_(total)
            else:
                master.grad = total
        if self.combined:
            self._check_buffers()
        return False

    def _check_buffers(self):
        if hasattr(self.optimizer, "_maybe_init_combined_params_and_grads"):
            self.optimizer._maybe_init_combined_params_and_grads()
        buffers = [p.grad.data_ptr() for pair in self.pairs for p in pair if p.grad is not None]
        if self._buffers is not None and buffers != self._buffers:
            raise RuntimeError("Combined grad has been destroyed: gradients must be zeroed in place, not set to None")
        self._buffers = buffers

    @torch.no_grad()
    def _clip(self, optimizer, max_norm, norm_type=2):
        """Scales the gradients that the optimizer steps so that their norm is at most `max_norm`; gives it before."""
        if not self.combined or self._buffers is None:
            raise RuntimeError("there are no combined gradients: set combine_grad=True, and call it after backward")
        calls.append(("clip", {"max_norm": max_norm}))
        gradients = [master.grad for _, master in self.pairs if master.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients, norm_type)
        for gradient in gradients:
            gradient.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def _stepped(self, closure):
        if closure is not None:
            raise RuntimeError("Currently, Amp does not support closure use with optimizers.")
        if self.has_scaled_gradients:
            raise RuntimeError("optimizer.step() must wait for a backward pass with delay_unscale=False")
        result = self._step()
        if self.master_weights:
            self._lazy_init()
            with torch.no_grad():
                for parameter, master in self.pairs:
                    if master is not parameter:
                        parameter.copy_(master)
            self._clear_masters()
        calls.append(("step", {}))
        return result

    def skip_next_step(self, scale, verbosity):
        if self._is_skipping:
            return
        self._is_skipping, step = True, self.optimizer.step

        def skip(closure=None):
            if verbosity:
                print(f"Gradient overflow.  Skipping step, reducing loss scale to {scale}")
            self._clear_masters()
            self.optimizer.step, self._is_skipping = step, False
            calls.append(("skipped", {"loss_scale": scale}))

        self.optimizer.step = skip

    def _zero_grad(self):
        self._lazy_init()
        for parameter, master in self.pairs:
            if parameter.grad is not None:
                parameter.grad.zero_()
            if master is not parameter:
                self._clear(master)
