"""Small pictures of a folder, decoded once and then kept as one tensor."""

import sys

import torch
from rich.console import Console
from rich.progress import track

from image_classification.config import DataConfig
from image_classification.data.arrays import ArrayDataset
from image_classification.data.decode import ImageReadError
from image_classification.data.pictures import PictureDataset
from image_classification.data.prefetch import Prefetcher
from image_classification.data.sources import FileSource

SHIFT_SHARE = 8
"""Training crops are shifted by up to this fraction of their size, as in `augment.small_training_view`."""
DECODE_BATCH = 64


def becomes_resident(dataset: ArrayDataset | PictureDataset, config: DataConfig) -> bool:
    """Whether these are files that `decode_all` will read once.

    Only small pictures: a training view of a big one is a part of it in its own resolution.
    """
    if isinstance(dataset, ArrayDataset) or not dataset.small_images or config.resident == "off":
        return False
    return config.resident != "auto" or len(dataset) * _image_bytes(dataset) <= config.resident_bytes


def _image_bytes(dataset: PictureDataset) -> int:
    return 3 * dataset.image_size**2


def stays_on_device(dataset: ArrayDataset, config: DataConfig) -> bool:
    """Whether the images that are in memory lie on the device too."""
    if config.resident == "auto":
        return dataset.images.nbytes <= config.resident_bytes
    return config.resident == "device"


def decode_all(
    dataset: PictureDataset, indices: torch.Tensor, config: DataConfig, *, training: bool, show_progress: bool
) -> tuple[ArrayDataset, dict[str, ImageReadError]]:
    """Decodes the images of these numbers with `config.workers` processes, in that order.

    Args:
        training: crop and mirror them as `small_training_view` does, else leave them as they are.
        show_progress: on a terminal.

    Returns:
        The images, and those that were skipped because they cannot be decoded, by their paths.

    Raises:
        ImageReadError: a picture cannot be decoded.
        LoaderError: no picture came for `config.data_timeout` seconds.
    """
    size = dataset.image_size
    pixels = torch.empty((len(indices), size, size, 3), dtype=torch.uint8)
    labels = torch.empty(len(indices), dtype=torch.int64)
    chunks = indices.split(DECODE_BATCH) if len(indices) else ()
    cpu = torch.device("cpu")
    source = FileSource(dataset, 0, cpu, batch_size=DECODE_BATCH, workers=config.workers or 0, timeout_seconds=0)
    phase = f"reading the {dataset.split} images"
    # Copies, because some of them wait; the source uses its memory again.
    copies = ((images.clone(), batch_labels) for images, batch_labels in source.batches(None, chunks, phase))
    batches = Prefetcher(copies, depth=2, device=cpu, phase=phase, timeout_seconds=config.data_timeout)
    console = Console(file=sys.stdout)
    disable = not (show_progress and console.is_terminal)
    stopped = False
    try:
        start = 0
        for images, batch_labels in track(
            batches, f"reading {dataset.split}", total=len(chunks), console=console, transient=True, disable=disable
        ):
            end = start + len(images)
            pixels[start:end], labels[start:end] = images.permute(0, 2, 3, 1), batch_labels
            start = end
    finally:
        stopped = batches.stop()
        source.close(at_once=not stopped)
    assert start + source.num_left_out == len(indices), "a batch is missing"
    pixels, labels = pixels[:start].permute(0, 3, 1, 2), labels[:start]
    pad = size // SHIFT_SHARE if training else 0
    return ArrayDataset(pixels, labels, size, dataset.mean, dataset.std, pad, flip=training), source.bad_images
