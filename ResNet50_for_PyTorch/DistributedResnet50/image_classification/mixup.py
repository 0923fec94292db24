"""Mixup and cutmix: each image is mixed with its neighbour in the batch, and so are their targets."""

import math
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Mixup:
    """Mixes a batch with itself, rolled by one; the mixture is lambda of the image and 1 - lambda of its neighbour.

    Lambda ~ Beta(alpha, alpha), drawn once for a batch. Mixup adds the weighted pixels (Zhang et al. 2018,
    arXiv:1710.09412, equation 1). Cutmix pastes a box of the neighbour, about 1 - lambda of the area, and takes as
    lambda the share that is left of the image, as the image's edge may cut the box (Yun et al. 2019,
    arXiv:1905.04899, section 3.1).

    The draws are a function of (seed, step, rank, position), so a resumed run repeats those of the uninterrupted one.
    They are made on the host and reach the device as arguments of its kernels: nobody waits for a copy.

    Args:
        mixup_alpha: alpha of mixup, 0 for none.
        cutmix_alpha: alpha of cutmix, 0 for none. With both, each batch has one of them, each with chance 1/2.
        num_classes: K, width of the soft targets.
        seed: seed of the run.
        rank: number of this rank; ranks draw apart.
        stop_step: first step that sees the batches as they are.
    """

    mixup_alpha: float
    cutmix_alpha: float
    _: KW_ONLY
    num_classes: int
    seed: int
    rank: int
    stop_step: int

    def __call__(self, images: Tensor, labels: Tensor, step: int, position: int) -> tuple[Tensor, Tensor]:
        """Mixes one micro-batch; its tensors stay as they are.

        Args:
            images: [N, C, H, W], floating.
            labels: [N], int64, 0 to K - 1.
            step: optimizer updates before this one.
            position: number of the micro-batch within the update.

        Returns:
            Images, of the same type and memory format, and soft targets, [N, K], float32. From `stop_step` on: the
            arguments.
        """
        if step >= self.stop_step:
            return images, labels
        rng = np.random.default_rng((self.seed, step, self.rank, position))
        cut = self.cutmix_alpha > 0 and (self.mixup_alpha == 0 or rng.random() < 0.5)
        alpha = self.cutmix_alpha if cut else self.mixup_alpha
        lam = float(rng.beta(alpha, alpha))
        if cut:
            mixed, lam = _cutmix(images, lam, rng)
        else:
            mixed = _blend(images, lam)
        # F.one_hot reads the smallest label back to check it.
        one_hot = labels.unsqueeze(1) == torch.arange(self.num_classes, device=labels.device)
        return mixed, _blend(one_hot.float(), lam)


def _roll(batch: Tensor) -> Tensor:
    """The neighbours, [N, ...]; torch.roll would lose the memory format on CUDA."""
    return torch.cat([batch[-1:], batch[:-1]])


def _blend(batch: Tensor, lam: float) -> Tensor:
    return torch.lerp(batch, _roll(batch), 1 - lam)


def _cutmix(images: Tensor, lam: float, rng: np.random.Generator) -> tuple[Tensor, float]:
    """The images with boxes of their neighbours, and lambda for the area of the box."""
    height, width = images.shape[-2:]
    rows, columns = (_interval(size, math.sqrt(1 - lam), rng) for size in (height, width))
    mixed = images.clone()
    mixed[..., rows, columns] = _roll(images[..., rows, columns])
    return mixed, 1 - (rows.stop - rows.start) * (columns.stop - columns.start) / (height * width)


def _interval(size: int, share: float, rng: np.random.Generator) -> slice:
    """About `share` of `size` pixels around a uniform centre, cut at the edges."""
    centre, half = int(rng.integers(size)), int(size * share) // 2
    return slice(max(centre - half, 0), min(centre + half, size))
