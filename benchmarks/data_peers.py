"""What data_pipeline.py measures our input pipeline against: one call of each function's result reads so many images."""

from collections.abc import Callable, Iterable
from pathlib import Path

import simplejpeg
import torch
import torchvision
from record_formats import write_litdata, write_webdataset
from torchvision import transforms

from image_classification.data import ArrayDataset, augment
from image_classification.data.datasets import IMAGENET_MEAN, IMAGENET_STD
from image_classification.data.decode import Picture, prepare_worker
from image_classification.data.order import image_generator

Run = Callable[[], None]


def torchvision_folder(folder: Path, batches: list[list[int]], size: int) -> Run:
    """The training batches of the usual ImageNet example, with a fresh worker."""
    normalize = transforms.Normalize(IMAGENET_MEAN, IMAGENET_STD)
    crops = [transforms.RandomResizedCrop(size), transforms.RandomHorizontalFlip()]
    dataset = torchvision.datasets.ImageFolder(
        str(folder), transforms.Compose([*crops, transforms.ToTensor(), normalize])
    )
    num_images = sum(map(len, batches))
    return lambda: count(torch.utils.data.DataLoader(dataset, batch_sampler=batches, num_workers=1), num_images)


def torchvision_cifar(dataset: ArrayDataset, batch_size: int) -> Run:
    """An epoch of CIFAR-10 in the usual way, with a fresh worker."""
    # Not by its constructor, which wants all 60,000 images.
    pictures = torchvision.datasets.CIFAR10.__new__(torchvision.datasets.CIFAR10)
    pictures.data, pictures.targets = dataset.images.permute(0, 2, 3, 1).numpy(), dataset.labels.tolist()
    crops = [transforms.RandomCrop(32, 4), transforms.RandomHorizontalFlip()]
    normalize = transforms.Normalize(dataset.mean, dataset.std)
    pictures.transform, pictures.target_transform = transforms.Compose([*crops, transforms.ToTensor(), normalize]), None

    def run() -> None:
        loader = torch.utils.data.DataLoader(pictures, batch_size, shuffle=True, drop_last=True, num_workers=1)
        count(loader, len(dataset) // batch_size * batch_size)

    return run


def bare_decode(encoded: list[bytes]) -> Run:
    """Every picture decoded whole, in this process, and nothing else."""

    def run() -> None:
        for data in encoded:
            simplejpeg.decode_jpeg(data)

    return run


def webdataset_shards(encoded: list[bytes], folder: Path, batch_size: int, size: int) -> Run:
    """Sequential shards and a shuffle buffer of 1,000, with our decoder and crops.

    Raises:
        ModuleNotFoundError: it is not installed; so does litdata_chunks.
    """
    import webdataset

    write_webdataset(folder, encoded)
    shards = sorted(map(str, folder.iterdir()))

    def view(sample: dict) -> tuple[torch.Tensor, int]:
        return _view(sample["jpg"], int(sample["__key__"]), size), int(sample["cls"])

    def run() -> None:
        dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), seed=0, empty_check=False)
        dataset = dataset.shuffle(1000).map(view)
        loader = torch.utils.data.DataLoader(dataset, batch_size, num_workers=1, worker_init_fn=_start_worker)
        count(loader, len(encoded))

    return run


def litdata_chunks(encoded: list[bytes], folder: Path, batch_size: int, size: int) -> Run:
    """Its shuffled StreamingDataset, with our decoder and crops."""
    import litdata

    write_litdata(folder, encoded)

    class Views(litdata.StreamingDataset):
        def __getitem__(self, index) -> tuple[torch.Tensor, int]:
            sample = super().__getitem__(index)
            return _view(sample["image"], sample["label"], size), sample["label"]

    def run() -> None:
        dataset = Views(str(folder), shuffle=True)
        loader = litdata.StreamingDataLoader(
            dataset, batch_size=batch_size, num_workers=1, worker_init_fn=_start_worker
        )
        count(loader, len(encoded))

    return run


def count(batches: Iterable, num_images: int) -> None:
    """Reads all batches."""
    assert sum(len(labels) for _, labels in batches) == num_images


def _view(data: bytes, index: int, size: int) -> torch.Tensor:
    view = augment.big_training_view(Picture(data), size, image_generator(0, 0, index))
    return torch.from_numpy(view.copy()).permute(2, 0, 1)


def _start_worker(_worker: int) -> None:
    prepare_worker()
