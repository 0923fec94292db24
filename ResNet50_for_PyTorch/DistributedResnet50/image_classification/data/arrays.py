"""Data sets that are one tensor: CIFAR once read, scikit-learn's digits, and random pixels."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional

from mmcls.utils.errors import RequestError

DIGITS_SIDE, DIGITS_MAX, DIGITS_VAL_IMAGES = 8, 16, 360
SYNTHETIC_CLASSES, SYNTHETIC_IMAGES, SYNTHETIC_POOL = 1000, 1280, 256


@dataclass(frozen=True)
class ArrayDataset:
    """Images that are all in memory, with what the loaders need to know about them.

    Args:
        images: `[M, 3, H, W]`, uint8, best channels-last in memory; image i of the N is number i mod M, so a small
            pool can stand for many.
        labels: `[N]`, int64.
        image_size: height and width of the network's input; batches are resized where H differs.
        mean, std: per channel, in units of the full range (0..1).
        pad: training crops are shifted by up to this many pixels over a zero border.
        flip: training images are mirrored half of the time.
    """

    images: torch.Tensor
    labels: torch.Tensor
    image_size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    pad: int = 0
    flip: bool = False

    def __len__(self) -> int:
        return len(self.labels)


def digits(image_size: int, pad: int) -> tuple[ArrayDataset, ArrayDataset]:
    """The 1,797 handwritten digits of scikit-learn: 1,437 to train and 360 to validate, the same in every run.

    A mirrored digit is another shape, so they are shifted but not mirrored.

    Raises:
        RequestError: scikit-learn is not installed.
    """
    try:
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise RequestError(
            "--data_path=digits", f"scikit-learn, which holds them: {error}", "pip install scikit-learn"
        ) from error
    data = load_digits()
    train, val = train_test_split(
        np.arange(len(data.target)), test_size=DIGITS_VAL_IMAGES, stratify=data.target, random_state=0
    )
    grey = torch.from_numpy(data.data).float().reshape(-1, 1, DIGITS_SIDE, DIGITS_SIDE) * (255 / DIGITS_MAX)
    grey = functional.interpolate(grey, (image_size, image_size), mode="bilinear", align_corners=False)
    images = grey.round().to(torch.uint8).repeat(1, 3, 1, 1)
    labels = torch.from_numpy(data.target).long()

    def part(indices: np.ndarray, pad: int) -> ArrayDataset:
        # Mean and deviation of the pixels, 0.305 and 0.376 of the range.
        return ArrayDataset(images[indices], labels[indices], image_size, (0.305,) * 3, (0.376,) * 3, pad)

    return part(train, pad), part(val, 0)


def synthetic(num_images: int, num_classes: int, image_size: int, split: str) -> ArrayDataset:
    """Random pixels for throughput without data, from a small pool; the labels go round all classes."""
    rng = np.random.default_rng(0 if split == "train" else 1)
    pixels = rng.integers(0, 256, size=(min(num_images, SYNTHETIC_POOL), 3, image_size, image_size), dtype=np.uint8)
    labels = torch.arange(num_images) % num_classes
    # Mean and deviation of uniform pixels.
    return ArrayDataset(torch.from_numpy(pixels), labels, image_size, (0.5,) * 3, (0.289,) * 3)
