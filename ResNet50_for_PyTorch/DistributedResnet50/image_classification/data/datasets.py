"""Opens a data set that was found by `detect_layout`."""

from dataclasses import dataclass

import torch

from image_classification.config import DataConfig
from image_classification.data import arrays, cifar, folder
from image_classification.data.arrays import ArrayDataset
from image_classification.data.folder import FolderDataset
from image_classification.data.layouts import DataLayout
from image_classification.data.pictures import PictureDataset
from image_classification.data.records.dataset import RecordDataset
from image_classification.data.records.manifest import read_manifest

# Mean and deviation of each channel over the training images, as they are published and used everywhere.
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
CIFAR_STATISTICS = {
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
    "cifar100": ((0.5071, 0.4865, 0.4409), (0.2673, 0.2564, 0.2762)),
}
SHIFT_SHARE = 8
"""Crops of small images are shifted by up to this fraction of their size (4 of CIFAR's 32 pixels)."""


@dataclass(frozen=True)
class Datasets:
    """Training and validation images with one numbering of the classes.

    `warnings` are what the full listing has shown, in addition to the layout's.
    """

    train: ArrayDataset | PictureDataset
    val: ArrayDataset | PictureDataset
    num_classes: int
    class_names: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def open_datasets(layout: DataLayout, config: DataConfig, image_size: int) -> Datasets:
    """Opens the data set; lists every picture of a folder and reads all of CIFAR.

    Args:
        image_size: height and width of the network's input in pixels.

    Raises:
        RequestError: the data are not what they were when the layout was detected.
    """
    if layout.kind == "folder":
        return _open_folder(layout, config, image_size)
    if layout.kind == "records":
        return _open_records(layout, config, image_size)
    if layout.kind == "digits":
        train, val = arrays.digits(image_size, image_size // SHIFT_SHARE)
        return Datasets(train, val, layout.num_classes, tuple("0123456789"))
    if layout.kind == "synthetic":
        count = config.synthetic_images or arrays.SYNTHETIC_IMAGES
        counts = {"train": count, "val": max(1, count // 4)}
        train, val = (arrays.synthetic(n, layout.num_classes, image_size, split) for split, n in counts.items())
        return Datasets(train, val, layout.num_classes, tuple(map(str, range(layout.num_classes))))
    return _open_cifar(layout, image_size)


def _open_folder(layout: DataLayout, config: DataConfig, image_size: int) -> Datasets:
    class_names = folder.scan_folders(layout.path, config.allow_empty_classes).class_names
    options = _picture_options(layout, config, image_size)
    train, val = (FolderDataset(layout.path, split, class_names, **options) for split in ("train", "val"))
    hidden = sorted(train.hidden + val.hidden)
    warnings = (f"ignored files whose names begin with a dot: {folder.shorten(hidden)}",) if hidden else ()
    return Datasets(train, val, len(class_names), class_names, warnings)


def _open_records(layout: DataLayout, config: DataConfig, image_size: int) -> Datasets:
    manifest = read_manifest(layout.path)
    options = _picture_options(layout, config, image_size)
    train = RecordDataset(layout.path, "train", manifest.classes, manifest.train, **options)
    val = RecordDataset(layout.path, "val", manifest.classes, manifest.val, **options)
    return Datasets(train, val, layout.num_classes, manifest.classes)


def _picture_options(layout: DataLayout, config: DataConfig, image_size: int) -> dict:
    return {
        "image_size": image_size,
        "small_images": layout.small_images,
        "mean": IMAGENET_MEAN,
        "std": IMAGENET_STD,
        "exif_rotation": config.exif_rotation,
        "skip_bad": config.on_bad_image == "skip",
    }


def _open_cifar(layout: DataLayout, image_size: int) -> Datasets:
    version = cifar.version_of_folder(layout.path)
    mean, std = CIFAR_STATISTICS[layout.kind]

    def open_split(split: str, pad: int, flip: bool) -> ArrayDataset:
        images, labels = cifar.read_folder(layout.path, version, split)
        # The order in memory that batches are gathered in: else the loader would hold a second copy.
        images = torch.from_numpy(images).contiguous(memory_format=torch.channels_last)
        return ArrayDataset(images, torch.from_numpy(labels), image_size, mean, std, pad, flip)

    train = open_split("train", cifar.IMAGE_SIDE // SHIFT_SHARE, flip=True)
    val = open_split("val", 0, flip=False)
    return Datasets(train, val, version.num_classes, cifar.read_class_names(layout.path, version))
