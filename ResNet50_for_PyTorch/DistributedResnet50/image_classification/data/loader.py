"""Batches for training and validation, on the device and ready for the network."""

import signal
from collections.abc import Iterator, Sequence

import torch
from torch.utils.data import DataLoader, Dataset

from image_classification.data import augment
from image_classification.data.arrays import ArrayDataset
from image_classification.data.decode import ImageReadError
from image_classification.data.folder import FolderDataset
from image_classification.data.order import epoch_generator, epoch_order, rank_batches

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images `[B, 3, S, S]` and labels `[B]`, int64."""


class TrainLoader:
    """The shuffled and augmented training images of one rank.

    What it gives is a pure function of (seed, epoch, number of the micro-batch): workers do not enter, and the images
    of a global micro-batch are the same for any number of ranks with the same product with the micro-batch's size.

    Args:
        micro_batch_size: images of a rank's batch; all batches are full.
        micro_batches_per_epoch: batches of an epoch, the same on every rank; images that fill none are left out, other
            ones in each epoch.
        seed: of order and augmentation.
        device: where the batches go.
        workers: loader processes for a FolderDataset, 0 for none; they live until `close`.
        memory_format: of the images.
    """

    def __init__(
        self,
        dataset: ArrayDataset | FolderDataset,
        *,
        micro_batch_size: int,
        micro_batches_per_epoch: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
        workers: int,
        memory_format: torch.memory_format,
    ):
        self._num_images = len(dataset)
        self._micro_batch_size, self._micro_batches_per_epoch = micro_batch_size, micro_batches_per_epoch
        self._rank, self._world_size, self._seed = rank, world_size, seed
        self._source = _make_source(dataset, seed, device, workers)
        self._to_input = _InputTransform(dataset, device, memory_format)

    def epoch(self, epoch: int, first_micro_batch: int = 0, augment: bool = True) -> Iterator[Batch]:
        """Yields the epoch's batches from a position on: images float32, normalised, and labels, on the device.

        Without `augment` the images are seen as in validation; their order is the same.

        Raises:
            ImageReadError: a picture cannot be decoded.
        """
        order = epoch_order(self._seed, epoch, self._num_images)
        batches = rank_batches(
            order, self._micro_batch_size, self._micro_batches_per_epoch, self._rank, self._world_size
        )
        indices = list(torch.from_numpy(batches[first_micro_batch:]))
        for images, labels in self._source.batches(epoch if augment else None, indices):
            yield self._to_input(images), labels

    def close(self) -> None:
        """Stops the loader processes."""
        self._source.close()


class EvalLoader:
    """One rank's share of the validation images: every `world_size`-th, in order, each exactly once.

    The last batch may be small, and a rank may have no image at all.

    Args:
        batch_size: images of a batch.
        device, workers, memory_format: as in TrainLoader.
    """

    def __init__(
        self,
        dataset: ArrayDataset | FolderDataset,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        workers: int,
        memory_format: torch.memory_format,
    ):
        share = torch.arange(len(dataset))[rank::world_size]
        self._indices = [share[start : start + batch_size] for start in range(0, len(share), batch_size)]
        self._source = _make_source(dataset, 0, device, workers)
        self._to_input = _InputTransform(dataset, device, memory_format)

    def __len__(self) -> int:
        return len(self._indices)

    def __iter__(self) -> Iterator[Batch]:
        for images, labels in self._source.batches(None, self._indices):
            yield self._to_input(images), labels

    def close(self) -> None:
        """Stops the loader processes."""
        self._source.close()


class _InputTransform:
    """Turns uint8 images on the device into the network's input."""

    def __init__(self, dataset: ArrayDataset | FolderDataset, device: torch.device, memory_format: torch.memory_format):
        self._size, self._memory_format = dataset.image_size, memory_format
        self._mean, self._std = (
            torch.tensor(values, device=device).mul_(255).view(1, 3, 1, 1) for values in (dataset.mean, dataset.std)
        )

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        return augment.to_input(images, self._mean, self._std, self._size, self._memory_format)


class _ArraySource:
    """Batches of an ArrayDataset: the whole of it lies on the device, and tensor operations do the rest."""

    def __init__(self, dataset: ArrayDataset, seed: int, device: torch.device):
        self._images, self._labels = dataset.images.to(device), dataset.labels.to(device)
        self._pad, self._flip, self._seed, self._device = dataset.pad, dataset.flip, seed, device

    def batches(self, epoch: int | None, indices: Sequence[torch.Tensor]) -> Iterator[Batch]:
        table = None
        if epoch is not None and (self._pad or self._flip):
            rng = epoch_generator(self._seed, epoch)
            table = augment.CropFlipTable.draw(
                rng, len(self._labels), pad=self._pad, flip=self._flip, device=self._device
            )
        # One copy an epoch: a copy of indices in each step would make the host wait for the device each time.
        sizes = [len(chosen) for chosen in indices]
        on_device = torch.cat(indices).to(self._device).split(sizes) if indices else ()
        for chosen in on_device:
            images = self._images[chosen % len(self._images)]
            if table is not None:
                images = augment.crop_flip(images, chosen, table)
            yield images, self._labels[chosen]

    def close(self) -> None:
        """There is nothing to stop."""


class _FolderSource:
    """Batches of a FolderDataset, decoded by loader processes that live over the epochs."""

    def __init__(self, dataset: FolderDataset, seed: int, device: torch.device, workers: int):
        self._device = device
        self._keys: list[tuple[int | None, torch.Tensor]] = []
        self._loader = DataLoader(
            _FolderBatches(dataset, seed),
            batch_size=None,
            # Asked anew for each epoch, in this process: so the workers need not be told about it.
            sampler=_Keys(self._keys),
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=device.type != "cpu",
            persistent_workers=workers > 0,
            worker_init_fn=_leave_signals_to_the_rank,
            # Without one of its own the DataLoader draws from the caller's.
            generator=torch.Generator(),
        )

    def batches(self, epoch: int | None, indices: Sequence[torch.Tensor]) -> Iterator[Batch]:
        self._keys[:] = [(epoch, chosen) for chosen in indices]
        for batch in self._loader:
            if isinstance(batch, ImageReadError):
                raise batch
            images, labels = batch
            yield images.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True)

    def close(self) -> None:
        # DataLoader has no public way to stop persistent workers before it is garbage collected.
        iterator = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _Keys:
    """What DataLoader takes for a sampler: the keys of the next epoch's batches."""

    def __init__(self, keys: list):
        self._keys = keys

    def __iter__(self):
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _FolderBatches(Dataset):
    """Maps (epoch or None for no augmentation, image indices) to a uint8 batch in channels-last order."""

    def __init__(self, dataset: FolderDataset, seed: int):
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int | None, torch.Tensor]) -> Batch | ImageReadError:
        epoch, indices = key
        size = self._dataset.image_size
        images = torch.empty((len(indices), size, size, 3), dtype=torch.uint8).permute(0, 3, 1, 2)
        labels = torch.empty(len(indices), dtype=torch.int64)
        try:
            for place, index in enumerate(indices.tolist()):
                if epoch is None:
                    images[place], labels[place] = self._dataset[index]
                else:
                    images[place], labels[place] = self._dataset.training_view(index, self._seed, epoch)
        except ImageReadError as error:
            # Raised in the main process: DataLoader would wrap a worker's traceback around the text.
            return error
        return images, labels


def _unchanged(batch):
    return batch


def _leave_signals_to_the_rank(_worker: int) -> None:
    """Ctrl-C reaches the whole process group, but the rank decides when its workers stop; it stops them by SIGTERM,
    which must not run the handler that a forked worker inherits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _make_source(
    dataset: ArrayDataset | FolderDataset, seed: int, device: torch.device, workers: int
) -> _ArraySource | _FolderSource:
    if isinstance(dataset, ArrayDataset):
        return _ArraySource(dataset, seed, device)
    return _FolderSource(dataset, seed, device, workers)
