"""Where the loaders take uint8 batches from: images that are all in memory, or files that loader processes decode."""

import signal
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info
from torch.utils.data._utils import signal_handling

from image_classification.data.arrays import ArrayDataset
from image_classification.data.augment_batches import CropFlipTable, crop_flip
from image_classification.data.decode import ImageReadError, prepare_worker
from image_classification.data.limits import (
    PREFETCH_FACTOR,
    LoaderError,
    dead_worker_line,
    explain_loader_failure,
    stalled_line,
)
from image_classification.data.order import epoch_generator
from image_classification.data.pictures import PictureDataset

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images `[B, 3, H, W]`, uint8 and channels-last in memory, and labels `[B]`, int64, both on the device."""


class ArraySource:
    """Batches of an ArrayDataset by tensor operations alone.

    Args:
        seed: of the augmentation.
        device: where the batches go.
        on_device: keep the images there; else in main memory, and only the batches are copied.
    """

    def __init__(self, dataset: ArrayDataset, seed: int, device: torch.device, on_device: bool):
        self.bad_images: dict[str, ImageReadError] = {}
        self.num_left_out = 0
        # Batches are gathered image by image, rows of pixels with their channels together.
        pixels = dataset.images.permute(0, 2, 3, 1).contiguous()
        self._pixels = pixels.to(device) if on_device else pixels
        self._copies = self._pixels.device.type != device.type
        self._labels = dataset.labels.to(device)
        self._pad, self._flip, self._seed, self._device = dataset.pad, dataset.flip, seed, device

    def batches(self, epoch: int | None, indices: Sequence[torch.Tensor], phase: str) -> Iterator[Batch]:
        """Yields a batch for each group of image numbers; without an epoch they are not augmented."""
        table = None
        if epoch is not None and (self._pad or self._flip):
            rng = epoch_generator(self._seed, epoch)
            table = CropFlipTable.draw(rng, len(self._labels), pad=self._pad, flip=self._flip, device=self._device)
        for chosen, on_device in zip(indices, to_device(indices, self._device)):
            places = (chosen if self._copies else on_device) % len(self._pixels)
            images = self._pixels.index_select(0, places).permute(0, 3, 1, 2)
            if self._copies:
                images = images.pin_memory().to(self._device, non_blocking=True)
            if table is not None:
                images = crop_flip(images, on_device, table)
            yield images, self._labels.index_select(0, on_device)

    def close(self, at_once: bool = False) -> None:
        """There is nothing to stop."""


def to_device(indices: Sequence[torch.Tensor], device: torch.device) -> Sequence[torch.Tensor]:
    """Copies groups of image numbers in one go: a copy in each step would make the host wait for the device."""
    return torch.cat(list(indices)).to(device).split([len(chosen) for chosen in indices]) if indices else ()


class FileSource:
    """Batches of files, decoded by loader processes that live over the epochs.

    Args:
        seed: of the augmentation.
        device: where the batches go.
        workers: loader processes, 0 for none.
        timeout_seconds: how long to wait for a batch of a loader process; 0 for ever.

    Attributes:
        bad_images: pictures that were asked for and skipped because they cannot be decoded, by their paths.
        num_left_out: how many pictures the latest batches lack because of that, so far.
    """

    def __init__(self, dataset: PictureDataset, seed: int, device: torch.device, workers: int, timeout_seconds: float):
        self._device, self._timeout_seconds, self._hangs = device, timeout_seconds, False
        self.bad_images: dict[str, ImageReadError] = {}
        self.num_left_out, self._replaces = 0, dataset.split == "train"
        self._keys: list[tuple[int | None, np.ndarray]] = []
        self._loader = DataLoader(
            _FileBatches(dataset, seed),
            batch_size=None,
            # Asked anew for each epoch, in this process: so the workers need not be told about it.
            sampler=_Keys(self._keys),
            num_workers=workers,
            collate_fn=_unchanged,
            pin_memory=device.type != "cpu",
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            timeout=timeout_seconds if workers else 0,
            worker_init_fn=_start_worker,
            # Without one of its own the DataLoader draws from the caller's.
            generator=torch.Generator(),
        )

    def batches(self, epoch: int | None, indices: Sequence[torch.Tensor], phase: str) -> Iterator[Batch]:
        """As ArraySource.batches; `phase` names them in errors.

        Raises:
            ImageReadError: a picture cannot be decoded.
            LoaderError: a loader process died, or no batch came in time.
        """
        self.num_left_out = 0
        # As arrays: each tensor that goes to a process takes a file of shared memory.
        self._keys[:] = [(epoch, chosen.numpy()) for chosen in indices]
        # Not when the first batch is asked for: that may be in a thread, and a process that is forked beside the
        # work of the main thread can inherit a lock that nobody will ever release.
        return self._read(iter(self._loader), phase)

    def _read(self, iterator: Iterator, phase: str) -> Iterator[Batch]:
        while True:
            try:
                batch = next(iterator, None)
            except Exception as error:  # what a dead process leaves half-sent can fail in any way
                raise self._explained(error, phase) from error
            if batch is None:
                return
            if isinstance(batch, ImageReadError):
                raise batch
            self.bad_images.update((error.path, error) for error in batch[2])
            self.num_left_out += 0 if self._replaces else len(batch[2])
            if not len(batch[1]):
                continue
            images = batch[0].to(self._device, non_blocking=True)
            # Copied on the CPU too: else labels that somebody keeps hold a file of shared memory open.
            labels = batch[1].to(self._device, non_blocking=True, copy=True)
            del batch
            yield images, labels

    def _explained(self, error: Exception, phase: str) -> Exception:
        """The same failure in plain words, where it is one of the loader processes."""
        text = str(error)
        if text.startswith("DataLoader timed out"):
            self._hangs = True
            return LoaderError(stalled_line(phase, self._timeout_seconds))
        workers = getattr(self._loader._iterator, "_workers", ())
        deadline = time.monotonic() + (1 if isinstance(error, EOFError | OSError) else 0)
        # Where a pipe broke, that its process is gone is seen a moment later.
        while not (dead := [worker for worker in workers if worker.exitcode]) and time.monotonic() < deadline:
            time.sleep(0.01)
        if dead:
            # A negative exit code is the signal that ended it.
            return LoaderError(dead_worker_line(dead[0].pid, max(0, -dead[0].exitcode)))
        line = explain_loader_failure(text)
        return LoaderError(line) if line else error

    def close(self, at_once: bool = False) -> None:
        """Stops the loader processes; `at_once` also those that do not answer."""
        # DataLoader has no public way to stop persistent workers before it is garbage collected.
        iterator = self._loader._iterator
        if iterator is None:
            return
        self._loader._iterator = None
        if at_once or self._hangs:
            # Else torch's handler of SIGCHLD reports them as lost.
            signal_handling._remove_worker_pids(id(iterator))
            iterator._worker_pids_set = False
            for worker in iterator._workers:
                worker.kill()
        iterator._shutdown_workers()


_FileBatch = tuple[torch.Tensor, torch.Tensor, list[ImageReadError]]
"""A batch, perhaps without the pictures of val/ that cannot be decoded, and those that could not be."""


class _Keys:
    """What DataLoader takes for a sampler: the keys of the next epoch's batches."""

    def __init__(self, keys: list):
        self._keys = keys

    def __iter__(self):
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)


class _FileBatches(Dataset):
    """Maps (epoch or None for no augmentation, image indices) to a uint8 batch in channels-last order."""

    def __init__(self, dataset: PictureDataset, seed: int):
        self._dataset, self._seed = dataset, seed

    def __getitem__(self, key: tuple[int | None, np.ndarray]) -> _FileBatch | ImageReadError:
        epoch, indices = key
        size = self._dataset.image_size
        pixels = torch.empty((len(indices), size, size, 3), dtype=torch.uint8)
        labels = torch.empty(len(indices), dtype=torch.int64)
        if get_worker_info() is not None:
            # Here a lack of shared memory is an error. DataLoader would move the batch there in a thread, where the
            # same lack loses the batch, and the consumer would wait for it for ever.
            pixels.share_memory_()
            labels.share_memory_()
        # Filled as arrays, which costs a third of what tensors do.
        views, numbers, filled, bad = pixels.numpy(), labels.numpy(), 0, []
        try:
            for index in indices.tolist():
                sample, errors = self._dataset.sample(index, self._seed, epoch)
                bad += errors
                if sample is not None:
                    views[filled], numbers[filled] = sample
                    filled += 1
        except ImageReadError as error:
            # Raised in the main process: DataLoader would wrap a worker's traceback around the text.
            return error
        return pixels[:filled].permute(0, 3, 1, 2), labels[:filled], bad


def _unchanged(batch):
    return batch


def _start_worker(_worker: int) -> None:
    prepare_worker()
    # Ctrl-C reaches the whole process group, but the rank decides when its workers stop; it stops them by SIGTERM,
    # which must not run the handler that a forked worker inherits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
