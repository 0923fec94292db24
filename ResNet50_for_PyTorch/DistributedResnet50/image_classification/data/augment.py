"""Random and fixed views of single pictures, as they are decoded."""

import math

import cv2
import numpy as np
import torch
from PIL import Image
from torch.nn import functional

from image_classification.data.decode import Box, Picture

CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10
FAST_TORCH_RESIZE = ("AVX2", "AVX512")
"""Instruction sets for which torch resizes uint8 pictures faster than OpenCV averages areas."""
VAL_RESIZE = 256 / 224
"""Short side of a big picture before its centre crop, in units of the crop (He et al. 2016, section 4.1)."""


def random_resized_crop_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Area and aspect ratio of a random crop (Szegedy et al. 2015, section 6), with torchvision's constants.

    The area is uniform in 8 to 100 % of the picture, the logarithm of the aspect ratio uniform between 3/4 and 4/3.
    After ten draws that do not fit it is the largest centre crop within those ratios.
    """
    for _ in range(CROP_ATTEMPTS):
        area = width * height * rng.uniform(*CROP_AREA)
        aspect = math.exp(rng.uniform(math.log(CROP_ASPECT[0]), math.log(CROP_ASPECT[1])))
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int(rng.integers(0, width - crop_width + 1))
            top = int(rng.integers(0, height - crop_height + 1))
            return left, top, left + crop_width, top + crop_height
    crop_width = min(width, max(1, round(height * CROP_ASPECT[1])))
    crop_height = min(height, max(1, round(width / CROP_ASPECT[0])))
    left, top = (width - crop_width) // 2, (height - crop_height) // 2
    return left, top, left + crop_width, top + crop_height


def center_box(width: int, height: int, short_side: int, size: int) -> Box:
    """The part of the source that is left of it when its short side is resized to `short_side` and `size` x `size`
    pixels are cropped from the middle; rounded as torchvision's Resize and CenterCrop round."""
    short = min(width, height)
    new_width, new_height = (
        short_side if side == short else int(short_side * side / short) for side in (width, height)
    )
    left, top = round((new_width - size) / 2), round((new_height - size) / 2)
    per_column, per_row = width / new_width, height / new_height
    return left * per_column, top * per_row, (left + size) * per_column, (top + size) * per_row


def resample(picture: Picture, box: Box, size: int) -> np.ndarray:
    """The box resized to `[size, size, 3]`, uint8: Pillow's bilinear filter, as torchvision's transforms have it."""
    pixels, box = picture.region(box, size)
    if pixels.shape[:2] == (size, size) and box == (0, 0, size, size):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=box))


def resample_fast(picture: Picture, box: Box, size: int) -> np.ndarray:
    """The same with less work, by whichever filter is the fastest at hand; within 2 grey levels of `resample` in mean.

    docs/input.md has the measurements. Edges are rounded to whole pixels of the decoded picture.
    """
    pixels, box = picture.region(box, size)
    left, top, right, bottom = (round(edge) for edge in box)
    crop = pixels[top:bottom, left:right]
    if max(crop.shape[:2]) <= size:
        return cv2.resize(crop, (size, size), interpolation=cv2.INTER_LINEAR)
    if torch.backends.cpu.get_cpu_capability() in FAST_TORCH_RESIZE:
        image = torch.from_numpy(crop.copy()).permute(2, 0, 1)[None]
        resized = functional.interpolate(image, (size, size), mode="bilinear", antialias=True)
        return resized[0].permute(1, 2, 0).numpy()
    # OpenCV averages areas only where both sides shrink, else it interpolates.
    return cv2.resize(crop, (size, size), interpolation=cv2.INTER_AREA)


def big_training_view(picture: Picture, size: int, rng: np.random.Generator) -> np.ndarray:
    """Random resized crop and mirror: `[size, size, 3]`, uint8."""
    view = resample_fast(picture, random_resized_crop_box(picture.width, picture.height, rng), size)
    return cv2.flip(view, 1) if rng.random() < 0.5 else view


def small_training_view(picture: Picture, size: int, rng: np.random.Generator) -> np.ndarray:
    """Centre square, shifted by up to an eighth of its size over a zero border, and mirror."""
    pad = size // 8
    padded = np.zeros((size + 2 * pad, size + 2 * pad, 3), dtype=np.uint8)
    padded[pad : pad + size, pad : pad + size] = small_view(picture, size)
    top, left = rng.integers(0, 2 * pad + 1, size=2)
    view = padded[top : top + size, left : left + size]
    return view[:, ::-1] if rng.random() < 0.5 else view


def big_view(picture: Picture, size: int) -> np.ndarray:
    """Centre crop of 7/8 of the short side, the usual view for validation: `[size, size, 3]`, uint8."""
    box = center_box(picture.width, picture.height, round(size * VAL_RESIZE), size)
    return resample(picture, box, size)


def small_view(picture: Picture, size: int) -> np.ndarray:
    """The whole centre square: `[size, size, 3]`, uint8."""
    return resample(picture, center_box(picture.width, picture.height, size, size), size)
