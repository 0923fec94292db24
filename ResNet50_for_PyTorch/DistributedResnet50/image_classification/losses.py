"""The training and validation loss."""

import torch.nn.functional as F
from torch import Tensor


def cross_entropy(logits: Tensor, labels: Tensor, label_smoothing: float = 0.0) -> Tensor:
    """Mean cross-entropy, computed in float32 whatever type the logits have.

    With smoothing e and K classes the target is 1 - e + e / K for the label and e / K for every other class
    (Szegedy et al. 2016, arXiv:1512.00567, section 7); K is the number of logits.

    Args:
        logits: [N, K], any floating type.
        labels: [N], int64, 0 to K - 1.
        label_smoothing: e, from 0 to 1.

    Returns:
        The loss, float32 scalar, in nats.
    """
    return F.cross_entropy(logits.float(), labels, label_smoothing=label_smoothing)
