"""Our input pipeline against those that people use instead, in images a second and core.

A core's second is a second of processor time of the main process and its one loader process together, so other work on
the machine does not count. Each claim prints `name ours peer ratio`; the ratio is the median over alternating pairs.

    crops_original   training crops of a folder of JPEGs, against torchvision's ImageFolder, RandomResizedCrop,
                     RandomHorizontalFlip, ToTensor and Normalize in a DataLoader. Ours ends with uint8 batches:
                     conversion and normalisation are done on the device.

    cifar_batches    training batches of 128 of CIFAR-10, normalised float32, against torchvision's CIFAR10 with
                     RandomCrop(32, 4), RandomHorizontalFlip, ToTensor and Normalize in a DataLoader; one epoch a run

    python3 benchmarks/data_pipeline.py --imagenet /data/imagenet [--claims crops_original] [--pairs 5]
"""

import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50")]

import cv2
import simplejpeg
import torch
import torchvision
import tyro
from common import machine_line, print_claim, process_seconds, time_alternating
from torchvision import transforms

from image_classification.config import DataConfig
from image_classification.data import ArrayDataset, FolderDataset, TrainLoader, detect_layout, open_datasets
from image_classification.data.datasets import IMAGENET_MEAN, IMAGENET_STD
from image_classification.data.order import epoch_order
from image_classification.data.sources import FileSource

CPU = torch.device("cpu")
CIFAR_BATCH = 128


@dataclass
class Options:
    imagenet: Path | None = None
    """Folder of ImageNet's JPEGs, with train/<class>/ and val/<class>/; a sample does."""
    cifar: Path | None = None
    """CIFAR-10's archive or its folder; a folder with fewer images does."""
    claims: tuple[str, ...] = ("crops_original",)
    pairs: int = 5
    images: int = 1024
    """Images of one timed run; a smaller folder is gone through several times."""
    batch_size: int = 64
    crop: int = 224


def indices(num_images: int, options: Options) -> list[torch.Tensor]:
    """Shuffled epochs, cut into batches."""
    epochs = -(-options.images // num_images)
    order = torch.cat([torch.from_numpy(epoch_order(0, epoch, num_images)) for epoch in range(epochs)])
    return list(order[: options.images].split(options.batch_size))


def our_batches(dataset: FolderDataset, options: Options) -> Callable[[], None]:
    """One call goes through uint8 training batches with a fresh worker."""

    def run() -> None:
        source = FileSource(dataset, 0, CPU, workers=1, timeout_seconds=0)
        num_images = sum(len(labels) for _, labels in source.batches(0, indices(len(dataset), options), "benchmark"))
        source.close()
        assert num_images == options.images

    return run


def torchvision_batches(folder: Path, options: Options) -> Callable[[], None]:
    """One call goes through the batches of the usual ImageNet example with a fresh worker."""
    normalize = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    crops = [transforms.RandomResizedCrop(options.crop), transforms.RandomHorizontalFlip()]
    dataset = torchvision.datasets.ImageFolder(
        str(folder), transforms.Compose([*crops, transforms.ToTensor(), normalize])
    )

    def run() -> None:
        batches = [chosen.tolist() for chosen in indices(len(dataset), options)]
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=1)
        assert sum(len(labels) for _, labels in loader) == options.images

    return run


def crops_original(options: Options) -> None:
    layout = detect_layout(str(options.imagenet))
    ours = our_batches(open_datasets(layout, DataConfig(), options.crop).train, options)
    peer = torchvision_batches(options.imagenet / "train", options)
    times = time_alternating(ours, peer, num_pairs=options.pairs, num_warmup=1, clock=process_seconds)
    print_claim("crops_original", *times.per_second(options.images), times.speedup)


def our_cifar_batches(dataset: ArrayDataset) -> Callable[[], None]:
    """One call goes through an epoch, in this process."""
    steps = len(dataset) // CIFAR_BATCH
    loader = TrainLoader(
        dataset,
        DataConfig(),
        micro_batch_size=CIFAR_BATCH,
        micro_batches_per_epoch=steps,
        rank=0,
        world_size=1,
        seed=0,
        device=CPU,
        memory_format=torch.channels_last,
    )
    epochs = itertools.count()

    def run() -> None:
        assert sum(1 for _ in loader.epoch(next(epochs))) == steps

    return run


def torchvision_cifar_batches(dataset: ArrayDataset) -> Callable[[], None]:
    """One call goes through an epoch with a fresh worker."""
    crops = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip()]
    # Not by its constructor, which wants all 60,000 images.
    pictures = torchvision.datasets.CIFAR10.__new__(torchvision.datasets.CIFAR10)
    pictures.data, pictures.targets = dataset.images.permute(0, 2, 3, 1).numpy(), dataset.labels.tolist()
    normalize = transforms.Normalize(dataset.mean, dataset.std)
    pictures.transform = transforms.Compose([*crops, transforms.ToTensor(), normalize])
    pictures.target_transform = None

    def run() -> None:
        loader = torch.utils.data.DataLoader(pictures, CIFAR_BATCH, shuffle=True, drop_last=True, num_workers=1)
        assert sum(1 for _ in loader) == len(dataset) // CIFAR_BATCH

    return run


def cifar_batches(options: Options) -> None:
    dataset = open_datasets(detect_layout(str(options.cifar)), DataConfig(), 32).train
    times = time_alternating(
        our_cifar_batches(dataset), torchvision_cifar_batches(dataset),
        num_pairs=options.pairs, num_warmup=1, clock=process_seconds,
    )  # fmt: skip
    print_claim("cifar_batches", *times.per_second(len(dataset) // CIFAR_BATCH * CIFAR_BATCH), times.speedup)


CLAIMS = {function.__name__: function for function in (crops_original, cifar_batches)}


def main(options: Options) -> None:
    torch.set_num_threads(1)
    print(machine_line())
    print(
        f"torchvision {torchvision.__version__}, simplejpeg {simplejpeg.__version__}, OpenCV {cv2.__version__};"
        f" {options.images} images a run, batches of {options.batch_size}, {options.pairs} pairs"
    )
    for name in options.claims:
        CLAIMS[name](options)


if __name__ == "__main__":
    main(tyro.cli(Options))
