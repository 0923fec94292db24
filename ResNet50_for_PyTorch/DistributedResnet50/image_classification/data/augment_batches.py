"""Augmentation and normalisation of whole batches, as tensor operations on the device.

Each image has its own draws, a row of a table made once an epoch on the host, so they are the same for any device.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn import functional


@dataclass(frozen=True)
class CropFlipTable:
    """One epoch's draws for every image of a data set: a shifted crop out of a zero border, and a mirror.

    Args:
        pad: width of the border in pixels.
        tops: `[N]` first row of the crop in the padded image, int64, 0..2 * pad.
        lefts: `[N]` first column, likewise.
        mirrored: `[N]` bool.
    """

    pad: int
    tops: torch.Tensor
    lefts: torch.Tensor
    mirrored: torch.Tensor

    @classmethod
    def draw(
        cls, rng: np.random.Generator, num_images: int, *, pad: int, flip: bool, device: torch.device
    ) -> "CropFlipTable":
        """Draws the table on the host, the same for any device."""
        corners = torch.from_numpy(rng.integers(0, 2 * pad + 1, size=(2, num_images))).to(device)
        mirrored = torch.from_numpy(rng.random(num_images) < (0.5 if flip else 0.0)).to(device)
        return cls(pad, corners[0], corners[1], mirrored)


def crop_flip(images: torch.Tensor, indices: torch.Tensor, table: CropFlipTable) -> torch.Tensor:
    """Applies each image's row of the table.

    Args:
        images: `[B, 3, H, W]` of any type; channels-last in memory is fastest.
        indices: `[B]` rows of the table, on the table's device.

    Returns:
        `[B, 3, H, W]`, in channels-last order in memory.
    """
    batch, channels, height, width = images.shape
    device, pad = images.device, table.pad
    padded = functional.pad(images.permute(0, 2, 3, 1), (0, 0, pad, pad, pad, pad)).flatten(2)
    # First whole rows, which is copying, then within each row: one gather shifts and mirrors.
    first_rows = torch.arange(batch, device=device) * padded.shape[1] + table.tops[indices]
    rows = (first_rows[:, None] + torch.arange(height, device=device)).flatten()
    rows = padded.flatten(0, 1).index_select(0, rows).view(batch, height, -1)
    steps = torch.arange(width, device=device)
    columns = table.lefts[indices, None] + torch.where(table.mirrored[indices, None], steps.flip(0), steps)
    columns = (columns[:, :, None] * channels + torch.arange(channels, device=device)).flatten(1)
    views = rows.gather(2, columns[:, None].expand(-1, height, -1))
    return views.view(batch, height, width, channels).permute(0, 3, 1, 2)


@dataclass(frozen=True)
class CutoutTable:
    """One epoch's draws of cutout for every image of a data set (DeVries & Taylor 2017, section 3.2).

    Args:
        side: of the square in pixels of the network's input.
        centers: `[2, N]` row and column of its centre, int64, anywhere in the image: part of it may lie outside.
    """

    side: int
    centers: torch.Tensor

    @classmethod
    def draw(
        cls, rng: np.random.Generator, num_images: int, *, side: int, image_size: int, device: torch.device
    ) -> "CutoutTable":
        """Draws the table on the host, the same for any device."""
        return cls(side, torch.from_numpy(rng.integers(0, image_size, size=(2, num_images))).to(device))


def cutout(images: torch.Tensor, indices: torch.Tensor, table: CutoutTable) -> torch.Tensor:
    """Sets a square of each image to 0, the mean of normalised images, in place.

    Args:
        images: `[B, 3, S, S]`, float32, normalised.
        indices: `[B]` rows of the table, on the table's device.
    """
    places = torch.arange(images.shape[-1], device=images.device)
    # The square covers side pixels from centre - side // 2 on, also where side is even.
    from_edge = places - table.centers[:, indices, None] + table.side // 2
    within = (from_edge >= 0) & (from_edge < table.side)
    return images.masked_fill_(within[0, :, None, :, None] & within[1, :, None, None, :], 0)


class InputTransform:
    """Turns uint8 images on the device into the network's input.

    Args:
        mean, std: per channel, in units of the full range (0..1).
        size: height and width of the result; images of another size are resized.
        memory_format: of the result.
    """

    def __init__(
        self,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
        size: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        self._size, self._memory_format = size, memory_format
        # A whole row of each: with three numbers the inner loop over a channels-last batch would be three long.
        self._mean, self._std = (
            torch.tensor(values, device=device).mul_(255).view(1, 3, 1, 1).expand(1, 3, 1, size)
            .contiguous(memory_format=memory_format)
            for values in (mean, std)
        )  # fmt: skip

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """`[B, 3, H, W]`, uint8, becomes `[B, 3, size, size]`, float32, normalised."""
        images = images.to(torch.float32, memory_format=self._memory_format)
        if images.shape[-1] != self._size:
            images = functional.interpolate(
                images, (self._size, self._size), mode="bilinear", align_corners=False,
                antialias=images.shape[-1] > self._size,
            ).contiguous(memory_format=self._memory_format)  # fmt: skip
        return images.sub_(self._mean).div_(self._std)
