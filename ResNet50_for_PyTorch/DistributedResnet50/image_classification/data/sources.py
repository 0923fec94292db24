"""Where the loaders take uint8 batches from: images that are all in memory, or files that loader processes decode."""

import signal
import sys
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from image_classification.data.arrays import ArrayDataset
from image_classification.data.augment_batches import CropFlipTable, crop_flip
from image_classification.data.decode import ImageReadError, prepare_worker
from image_classification.data.limits import (
    PREFETCH_FACTOR,
    LoaderError,
    dead_worker_line,
    explain_loader_failure,
    num_buffers,
    stalled_line,
)
from image_classification.data.order import epoch_generator
from image_classification.data.pictures import PictureDataset

# A rank that was spawned would spawn its loader processes too: each would import torch, for seconds and 200 MB, and hold
# a copy of the data set's names. Elsewhere than on Linux the system's own libraries may not survive a fork.
LOADER_START = "fork" if sys.platform == "linux" else None

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

    The processes fill a few buffers of shared memory again and again. With fresh memory for each batch, as DataLoader
    has it, a fifth of the time went to the system, which clears and maps its pages.

    Args:
        seed: of the augmentation.
        device: where the batches go.
        batch_size: images of the largest batch.
        workers: loader processes, 0 for none.
        timeout_seconds: how long to wait for a batch of a loader process; 0 for ever.

    Attributes:
        bad_images: pictures that were asked for and skipped because they cannot be decoded, by their paths.
        num_left_out: how many pictures the latest batches lack because of that, so far.
    """

    def __init__(
        self,
        dataset: PictureDataset,
        seed: int,
        device: torch.device,
        *,
        batch_size: int,
        workers: int,
        timeout_seconds: float,
    ):
        self._device, self._timeout_seconds, self._hangs = device, timeout_seconds, False
        self.bad_images: dict[str, ImageReadError] = {}
        self.num_left_out, self._replaces = 0, dataset.split == "train"
        self._workers, self._keys, self._all_read = workers, _Keys(), True
        self._files = _FileBatches(dataset, seed, _make_buffers(workers, batch_size, dataset.image_size))
        self._loader = DataLoader(
            self._files,
            batch_size=None,
            # Asked anew for each epoch, in this process: so the workers need not be told about it.
            sampler=self._keys,
            num_workers=workers,
            multiprocessing_context=LOADER_START if workers else None,
            collate_fn=_unchanged,
            persistent_workers=workers > 0,
            prefetch_factor=PREFETCH_FACTOR if workers else None,
            timeout=timeout_seconds if workers else 0,
            worker_init_fn=_start_worker,
            # Without one of its own the DataLoader draws from the caller's.
            generator=torch.Generator(),
        )

    def batches(self, epoch: int | None, indices: Sequence[torch.Tensor], phase: str) -> Iterator[Batch]:
        """As ArraySource.batches; `phase` names them in errors.

        On the CPU the images are a view of a buffer: they hold until the next batch is asked for.

        Raises:
            ImageReadError: a picture cannot be decoded.
            LoaderError: a loader process died, or no batch came in time.
        """
        self.num_left_out = 0
        if not self._all_read:
            # Its processes would have to finish what they are at, and one of them may hang.
            self.close(at_once=True)
        self._all_read = len(indices) == 0
        if self._workers == 0:
            # A thread that an earlier epoch had to leave in the middle of a batch still writes into its buffer.
            self._files.buffers = torch.empty_like(self._files.buffers)
        buffers = self._files.buffers
        free = self._keys.start(epoch, [chosen.numpy() for chosen in indices], len(buffers))
        try:
            # Not when the first batch is asked for: that may be in a thread, and a process that is forked beside the
            # work of the main thread can inherit a lock that nobody will ever release.
            iterator = iter(self._loader)
        except Exception as error:  # a process has died since the last epoch
            raise self._explained(error, phase) from error
        return self._read(iterator, len(indices), buffers, free, phase)

    def _read(
        self, iterator: Iterator, num_batches: int, buffers: torch.Tensor, free: list[int], phase: str
    ) -> Iterator[Batch]:
        while True:
            try:
                batch = next(iterator, None)
            except Exception as error:  # what a dead process leaves half-sent can fail in any way
                raise self._explained(error, phase) from error
            if batch is None:
                return
            num_batches -= 1
            # Not where the iterator ends: training takes its last batch and asks no more.
            self._all_read = num_batches == 0
            if isinstance(batch, ImageReadError):
                raise batch
            buffer, labels, errors = batch
            self.bad_images.update((error.path, error) for error in errors)
            self.num_left_out += 0 if self._replaces else len(errors)
            if len(labels):
                images = buffers[buffer, : len(labels)].permute(0, 3, 1, 2)
                yield self._on_device(images), self._on_device(torch.from_numpy(labels))
            free.append(buffer)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self._device.type == "cpu" else tensor.pin_memory().to(self._device, non_blocking=True)

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


_FileBatch = tuple[int, np.ndarray, list[ImageReadError]]
"""The number of the buffer whose first images are the batch, their labels, and the pictures that cannot be decoded."""


class _Keys:
    """What DataLoader takes for a sampler: for each batch of an epoch a free buffer, the epoch and image numbers.

    DataLoader asks for a key when it has a batch in its hands, so a buffer more than it works ahead is enough.
    """

    def start(self, epoch: int | None, indices: list[np.ndarray], buffers: int) -> list[int]:
        """Says what the next epoch is; returns the list of its free buffers, to which each that was read goes back.

        All are free: before the first key DataLoader waits for what its processes are still at.
        """
        self._epoch, self._indices, self._free = epoch, indices, list(range(buffers))
        return self._free

    def __iter__(self) -> Iterator[tuple[int, int | None, np.ndarray]]:
        # Its own list of buffers: an epoch that was left takes none of the next one's.
        free, epoch = self._free, self._epoch
        return ((free.pop(), epoch, indices) for indices in self._indices)


class _FileBatches(Dataset):
    """Maps (buffer, epoch or None for no augmentation, image indices) to a batch in that buffer."""

    def __init__(self, dataset: PictureDataset, seed: int, buffers: torch.Tensor):
        self._dataset, self._seed, self.buffers = dataset, seed, buffers

    def __getitem__(self, key: tuple[int, int | None, np.ndarray]) -> _FileBatch | ImageReadError:
        buffer, epoch, indices = key
        # Filled as arrays, which costs a third of what tensors do.
        views, labels = self.buffers[buffer].numpy(), np.empty(len(indices), dtype=np.int64)
        filled, bad = 0, []
        try:
            for index in indices.tolist():
                sample, errors = self._dataset.sample(index, self._seed, epoch)
                bad += errors
                if sample is not None:
                    views[filled], labels[filled] = sample
                    filled += 1
        except ImageReadError as error:
            # Raised in the main process: DataLoader would wrap a worker's traceback around the text.
            return error
        return buffer, labels[:filled], bad


def _make_buffers(workers: int, batch_size: int, image_size: int) -> torch.Tensor:
    """`[buffers, batch_size, image_size, image_size, 3]`, uint8, in shared memory where there are loader processes."""
    buffers = torch.empty((num_buffers(workers), batch_size, image_size, image_size, 3), dtype=torch.uint8)
    if workers:
        try:
            buffers.share_memory_()
        except RuntimeError as error:
            raise LoaderError(explain_loader_failure(str(error)) or str(error)) from error
    return buffers


def _unchanged(batch):
    return batch


def _start_worker(_worker: int) -> None:
    prepare_worker()
    # Ctrl-C reaches the whole process group, but the rank decides when its workers stop; it stops them by SIGTERM,
    # which must not run the handler that a forked worker inherits.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
