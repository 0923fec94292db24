"""The training and validation loss."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, computed in float32 whatever type the logits have.

    Of an image with target t over the K classes it is -sum_k t_k log softmax(logits)_k; a label is the target with 1
    at its place. Smoothing by e makes (1 - e) t + e / K of a target (Szegedy et al. 2016, arXiv:1512.00567, section 7).

    Args:
        logits: [N, K], any floating type.
        targets: labels, [N], int64, 0 to K - 1; or soft targets, [N, K], float32, each image's adding up to 1.
        label_smoothing: e, from 0 to 1.

    Returns:
        The loss, float32 scalar, in nats.
    """
    return F.cross_entropy(logits.float(), targets, label_smoothing=label_smoothing)
