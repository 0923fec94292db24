"""Random and fixed views of single pictures, as they are decoded."""

import math

import cv2
import numpy as np
from PIL import Image

from image_classification.data.decode import Box, Picture

CROP_AREA = (0.08, 1.0)
CROP_ASPECT = (3 / 4, 4 / 3)
CROP_ATTEMPTS = 10
AREA_SHRINK = 1.3
"""Averaging areas takes twice as long as interpolating, and below this factor comes hardly closer to Pillow's filter."""
VAL_RESIZE = 256 / 224
"""Short side of a big picture before its centre crop, in units of the crop (He et al. 2016, section 4.1)."""


def random_resized_crop_box(width: int, height: int, rng: np.random.Generator) -> Box:
    """Area and aspect ratio of a random crop (Szegedy et al. 2015, section 6), with torchvision's constants.

    The area is uniform in 8 to 100 % of the picture, the logarithm of the aspect ratio uniform between 3/4 and 4/3.
    After ten draws that do not fit it is the largest centre crop within those ratios.
    """
    for _ in range(CROP_ATTEMPTS):
        # One call for all four: made one by one they take as long as everything else here.
        area_draw, aspect_draw, left_draw, top_draw = rng.random(4).tolist()
        area = width * height * (CROP_AREA[0] + (CROP_AREA[1] - CROP_AREA[0]) * area_draw)
        aspect = CROP_ASPECT[0] * (CROP_ASPECT[1] / CROP_ASPECT[0]) ** aspect_draw
        crop_width, crop_height = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < crop_width <= width and 0 < crop_height <= height:
            left = int((width - crop_width + 1) * left_draw)
            top = int((height - crop_height + 1) * top_draw)
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
    # Whole: decoded at a fraction of their size, some photos are 4 grey levels off in mean.
    pixels = picture.pixels()
    if pixels.shape[:2] == (size, size) and box == (0, 0, size, size):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BILINEAR, box=box))


def resample_fast(picture: Picture, box: Box, size: int) -> np.ndarray:
    """The same in half the time, 0.8 grey levels off in mean over photos: OpenCV averages areas where a side shrinks
    by `AREA_SHRINK` or more, else interpolates, on a picture decoded at a fraction of its size where the box allows.

    Edges are rounded to whole pixels of the decoded picture.
    """
    pixels, box = picture.region(box, size)
    left, top, right, bottom = (round(edge) for edge in box)
    shrinks = max(right - left, bottom - top) >= AREA_SHRINK * size
    return cv2.resize(
        pixels[top:bottom, left:right],
        (size, size),
        interpolation=cv2.INTER_AREA if shrinks else cv2.INTER_LINEAR,
    )


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
