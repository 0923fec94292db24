"""Our input pipeline against those that people use instead, in images a second and core.

A core's second is a second of processor time of the main process and its one loader process together, so other work on
the machine does not count. Each claim prints `name ours peer ratio`; the ratio is the median over alternating pairs.
Ours ends with uint8 batches of ImageNet's pictures: conversion and normalisation are done on the device.

    crops_original         training crops of a folder of JPEGs, against torchvision's ImageFolder, RandomResizedCrop,
                           RandomHorizontalFlip, ToTensor and Normalize in a DataLoader
    crops_records          training crops of records packed with --resize_short=256, against the same peer
    records_vs_decode      the same records, against simplejpeg decoding the same bytes and nothing else
    records_vs_webdataset  the same, against WebDataset reading the same bytes with our decoder and crops
    records_vs_litdata     the same, against LitData reading them, likewise
    cifar_batches          training batches of 128 of CIFAR-10, normalised float32, against torchvision's CIFAR10 with
                           RandomCrop(32, 4), RandomHorizontalFlip, ToTensor and Normalize in a DataLoader; an epoch a run
    packing                wall time of packing with two processes, against one; the folder is repeated to 4,000 pictures

    python3 benchmarks/data_pipeline.py --imagenet /data/imagenet --cifar /data/cifar-10-batches-py [--claims packing]
"""

import itertools
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "ResNet50_for_PyTorch" / "DistributedResnet50")]

import cv2
import data_peers
import simplejpeg
import torch
import torchvision
import tyro
from common import PairedTimes, machine_line, print_claim, process_seconds, time_alternating

from image_classification.config import DataConfig
from image_classification.data import ArrayDataset, TrainLoader, detect_layout, open_datasets
from image_classification.data.order import epoch_order
from image_classification.data.pictures import PictureDataset
from image_classification.data.records.manifest import StoreOptions
from image_classification.data.records.pack import pack
from image_classification.data.sources import FileSource

CPU = torch.device("cpu")
CIFAR_BATCH = 128
STORED = StoreOptions(resize_short=256)
PACKED_PICTURES = 4000
PACK_WORKERS = 2


@dataclass
class Options:
    imagenet: Path | None = None
    """Folder of ImageNet's JPEGs, with train/<class>/ and val/<class>/; a sample does."""
    cifar: Path | None = None
    """CIFAR-10's archive or its folder; a folder with fewer images does."""
    claims: tuple[str, ...] = ()
    """Those to measure; all whose data are given unless some are named."""
    pairs: int = 5
    images: int = 2048
    """Images of one timed run; a smaller folder is gone through several times."""
    batch_size: int = 64
    crop: int = 224
    scratch: Path | None = None
    """Where records and other formats are written, the system's folder for temporary files unless given."""


class Inputs:
    """The data of the claims, made when one asks for them."""

    def __init__(self, options: Options, scratch: Path):
        self.options, self.scratch = options, scratch

    @cached_property
    def original(self) -> PictureDataset:
        return open_datasets(detect_layout(str(self.options.imagenet)), DataConfig(), self.options.crop).train

    @cached_property
    def records(self) -> PictureDataset:
        pack(str(self.options.imagenet), str(self.scratch / "records"), STORED, workers=1)
        return open_datasets(detect_layout(str(self.scratch / "records")), DataConfig(), self.options.crop).train

    @cached_property
    def stored_bytes(self) -> list[bytes]:
        return [self.records.encoded(i % len(self.records)) for i in range(self.options.images)]

    @cached_property
    def cifar(self) -> ArrayDataset:
        return open_datasets(detect_layout(str(self.options.cifar)), DataConfig(), 32).train

    def batches(self) -> list[torch.Tensor]:
        """Shuffled epochs of ImageNet's sample, cut into batches."""
        num_images = len(self.original)
        epochs = -(-self.options.images // num_images)
        order = torch.cat([torch.from_numpy(epoch_order(0, epoch, num_images)) for epoch in range(epochs)])
        return list(order[: self.options.images].split(self.options.batch_size))


def our_pictures(dataset: PictureDataset, inputs: Inputs) -> data_peers.Run:
    """uint8 training batches with a fresh worker."""
    options = inputs.options

    def run() -> None:
        source = FileSource(dataset, 0, CPU, batch_size=options.batch_size, workers=1, timeout_seconds=0)
        data_peers.count(source.batches(0, inputs.batches(), "benchmark"), options.images)
        source.close()

    return run


def our_cifar(dataset: ArrayDataset) -> data_peers.Run:
    """An epoch, in this process."""
    steps = len(dataset) // CIFAR_BATCH
    loader = TrainLoader(
        dataset, DataConfig(), micro_batch_size=CIFAR_BATCH, micro_batches_per_epoch=steps,
        rank=0, world_size=1, seed=0, device=CPU, memory_format=torch.channels_last,
    )  # fmt: skip
    epochs = itertools.count()
    return lambda: data_peers.count(loader.epoch(next(epochs)), steps * CIFAR_BATCH)


def torchvision_pictures(inputs: Inputs) -> data_peers.Run:
    batches = [chosen.tolist() for chosen in inputs.batches()]
    return data_peers.torchvision_folder(inputs.options.imagenet / "train", batches, inputs.options.crop)


def other_format(name: str, make_peer: Callable, inputs: Inputs) -> data_peers.Run:
    folder = inputs.scratch / name
    folder.mkdir()
    return make_peer(inputs.stored_bytes, folder, inputs.options.batch_size, inputs.options.crop)


CLAIMS = {
    "crops_original": lambda inputs: (our_pictures(inputs.original, inputs), torchvision_pictures(inputs)),
    "crops_records": lambda inputs: (our_pictures(inputs.records, inputs), torchvision_pictures(inputs)),
    "records_vs_decode": lambda inputs: (
        our_pictures(inputs.records, inputs),
        data_peers.bare_decode(inputs.stored_bytes),
    ),
    "records_vs_webdataset": lambda inputs: (
        our_pictures(inputs.records, inputs),
        other_format("webdataset", data_peers.webdataset_shards, inputs),
    ),
    "records_vs_litdata": lambda inputs: (
        our_pictures(inputs.records, inputs),
        other_format("litdata", data_peers.litdata_chunks, inputs),
    ),
    "cifar_batches": lambda inputs: (
        our_cifar(inputs.cifar),
        data_peers.torchvision_cifar(inputs.cifar, CIFAR_BATCH),
    ),
}
"""What each makes: one run of ours and one of the peer."""


def measure(name: str, inputs: Inputs) -> None:
    """Prints the line of one claim, or why there is none."""
    options = inputs.options
    if name == "packing":
        times, num_images = packing(inputs), PACKED_PICTURES
    else:
        try:
            ours, peer = CLAIMS[name](inputs)
        except ModuleNotFoundError as error:
            print(f"{name}: not measured, {error.name} is not installed")
            return
        times = time_alternating(ours, peer, num_pairs=options.pairs, num_warmup=1, clock=process_seconds)
        num_images = len(inputs.cifar) // CIFAR_BATCH * CIFAR_BATCH if name == "cifar_batches" else options.images
    print_claim(name, *times.per_second(num_images), times.speedup)


def packing(inputs: Inputs) -> PairedTimes:
    """Packs links to the sample's pictures, which are read and decoded like files of their own."""
    source = inputs.scratch / "source"
    for split, num_images in (("train", PACKED_PICTURES), ("val", 1)):
        (source / split / "all").mkdir(parents=True)
        for i in range(num_images):
            picture = inputs.original.path(i % len(inputs.original)).resolve()
            (source / split / "all" / f"{i}.jpg").symlink_to(picture)
    times = PairedTimes([], [])
    for _ in range(inputs.options.pairs):
        for workers, seconds in ((PACK_WORKERS, times.ours_seconds), (1, times.peer_seconds)):
            started = time.perf_counter()
            pack(str(source), str(inputs.scratch / "packed"), STORED, workers=workers)
            seconds.append(time.perf_counter() - started)
            shutil.rmtree(inputs.scratch / "packed")
    return times


def main(options: Options) -> None:
    torch.set_num_threads(1)
    print(machine_line())
    print(
        f"torchvision {torchvision.__version__}, simplejpeg {simplejpeg.__version__}, OpenCV {cv2.__version__};"
        f" {options.images} images a run, batches of {options.batch_size}, {options.pairs} pairs"
    )
    imagenet = [name for name in (*CLAIMS, "packing") if name != "cifar_batches"] if options.imagenet else []
    scratch = Path(tempfile.mkdtemp(dir=options.scratch))
    try:
        inputs = Inputs(options, scratch)
        for name in options.claims or (*imagenet, *(["cifar_batches"] if options.cifar else [])):
            measure(name, inputs)
    finally:
        shutil.rmtree(scratch)


if __name__ == "__main__":
    main(tyro.cli(Options))
