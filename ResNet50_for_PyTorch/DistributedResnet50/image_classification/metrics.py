"""Loss and accuracy as sums that stay on the device: batches and ranks add up, and one division ends it.

Sums weigh every image the same, whatever the sizes of the batches and the number of ranks; a mean of means does not.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

TOP_K = 5


def top_k(num_classes: int) -> int:
    """The k that "top-5" means for this number of classes: with fewer than 5 classes, all of them."""
    return min(TOP_K, num_classes)


def count_correct(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """Counts the images whose label is among the k largest logits.

    Args:
        logits: [N, K], any floating type.
        labels: [N], int64.
        k: taken as K where it is larger.

    Returns:
        The count, int64 scalar on the logits' device.
    """
    return _hits(logits, labels, k).sum()


@dataclass(frozen=True)
class Metrics:
    """Averages over `count` images.

    `top5_percent` is the share of labels among the `top_k(num_classes)` largest logits.
    """

    loss: float
    top1_percent: float
    top5_percent: float
    count: int


@dataclass(frozen=True)
class MetricSums:
    """Sums over images, on the device. Start with `MetricSums.zeros`.

    Args:
        values: [4], float32: sum of the losses, labels in the top 1, labels in the top 5, images. All-reduce it to
            add up ranks. The three counts are exact up to 2**24 (16,777,216) images; above that, float32 skips
            integers.
    """

    values: Tensor

    @classmethod
    def zeros(cls, device: torch.device | str) -> "MetricSums":
        """The sums over no image."""
        return cls(torch.zeros(4, device=device))

    @torch.no_grad()
    def add(self, loss_mean: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Adds a batch in place. Reads nothing back to the host, keeps no graph.

        Args:
            loss_mean: mean loss of the batch, scalar.
            logits: [N, K], N at least 1.
            labels: [N], int64.
        """
        num_images = len(labels)
        hits = _hits(logits, labels, TOP_K)
        batch = [
            loss_mean.float() * num_images,
            hits[:, 0].sum(dtype=torch.float32),
            hits.sum(dtype=torch.float32),
            # Filled on the device; torch.tensor(..., device=...) would copy from the host and wait for it.
            torch.full_like(loss_mean, num_images, dtype=torch.float32),
        ]
        self.values.add_(torch.stack(batch))

    def __add__(self, other: "MetricSums") -> "MetricSums":
        return MetricSums(self.values + other.values)

    def averages(self) -> Metrics:
        """Divides; this is the one place where the host reads from the device.

        Raises:
            ValueError: there is no image.
        """
        loss, top1, top5, count = self.values.tolist()
        if count == 0:
            raise ValueError("averages over no image")
        return Metrics(loss / count, 100 * top1 / count, 100 * top5 / count, int(count))


def _hits(logits: Tensor, labels: Tensor, k: int) -> Tensor:
    """[N, min(k, K)], bool: whether the label is the image's largest, second largest, ... logit."""
    top = logits.topk(min(k, logits.shape[1]), dim=1).indices
    return top == labels.unsqueeze(1)
