"""A moving average of the weights, which often scores better than the weights themselves."""

import torch
from torch import Tensor
from torch.optim.swa_utils import get_ema_multi_avg_fn


class WeightAverage:
    """Exponential moving average of a network's parameters and buffers.

    Floating tensors are averaged in float32, norm statistics among them; others, as the norms' counters, are copied.

    Args:
        weights: parameters and buffers by name; their values are where the average starts.
        decay: d, the weight of the past in an update, from 0 to 1; lower in the first updates, see `update`.
    """

    def __init__(self, weights: dict[str, Tensor], decay: float):
        self._decay = decay
        self._names = list(weights)
        self._averaged = {
            name: value.detach().float().clone() for name, value in weights.items() if value.is_floating_point()
        }
        self._copied = {name: value.detach().clone() for name, value in weights.items() if name not in self._averaged}

    @torch.no_grad()
    def update(self, weights: dict[str, Tensor], step: int) -> None:
        """Moves the average by 1 - d towards the weights, with d = min(decay, (1 + step) / (10 + step)).

        The second term lets the first weights fade soon (tf.train.ExponentialMovingAverage with `num_updates`).
        Without that, 1,000 steps at a decay of 0.9999 would leave nine tenths of them.

        Args:
            weights: the names that the average began with; of any floating type.
            step: optimizer updates done before these weights' own.
        """
        decay = min(self._decay, (1 + step) / (10 + step))
        new = [weights[name].float() for name in self._averaged]
        get_ema_multi_avg_fn(decay)(list(self._averaged.values()), new, None)
        if self._copied:
            torch._foreach_copy_(list(self._copied.values()), [weights[name] for name in self._copied])

    @property
    def weights(self) -> dict[str, Tensor]:
        """The averages themselves, not copies, in the order of the network's names."""
        values = self._averaged | self._copied
        return {name: values[name] for name in self._names}

    def state_dict(self) -> dict[str, Tensor]:
        return self.weights

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Takes the averages of another run of the same network.

        Raises:
            ValueError: names or shapes differ; nothing was changed.
        """
        own = self.weights
        if different := sorted(own.keys() ^ state.keys()):
            raise ValueError(f"{different[0]} (of {len(different)} names) is in one of the two averages only")
        for name, value in own.items():
            if value.shape != state[name].shape:
                raise ValueError(f"{name} is {tuple(state[name].shape)} there and {tuple(value.shape)} here")
        for name, value in own.items():
            value.copy_(state[name])
