"""Batches for training and validation, on the device and ready for the network."""

from collections.abc import Iterator, Sequence

import torch

from image_classification.config import DataConfig
from image_classification.data.arrays import ArrayDataset
from image_classification.data.augment_batches import CutoutTable, InputTransform, cutout
from image_classification.data.decode import ImageReadError
from image_classification.data.limits import check_limits
from image_classification.data.order import cutout_generator, epoch_order, rank_batches
from image_classification.data.pictures import PictureDataset
from image_classification.data.prefetch import Prefetcher
from image_classification.data.resident import DECODE_BATCH, becomes_resident, decode_all, stays_on_device
from image_classification.data.sources import ArraySource, FileSource, to_device

Batch = tuple[torch.Tensor, torch.Tensor]
"""Images `[B, 3, S, S]` and labels `[B]`, int64."""

PREFETCH_OF_FILES = 2


def check_loaders(train: ArrayDataset | PictureDataset, config: DataConfig, num_ranks: int) -> tuple[str, ...]:
    """Compares what the loaders of this machine will need with what it gives.

    Returns:
        Warnings, a line each.

    Raises:
        RequestError: too little shared memory or too few file handles.
    """
    if isinstance(train, ArrayDataset):
        return ()
    batch_size = DECODE_BATCH if becomes_resident(train, config) else config.batch_size
    return check_limits(config.workers or 0, 3 * batch_size * train.image_size**2, num_ranks)


class _Loader:
    """What both loaders share: a source, the way to the network's input, and the thread that works ahead."""

    def __init__(
        self,
        dataset: ArrayDataset | PictureDataset,
        config: DataConfig,
        batch_size: int,
        seed: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        self._device, self._timeout_seconds = device, config.data_timeout
        self._running: Prefetcher | None = None
        if isinstance(dataset, ArrayDataset):
            on_device = stays_on_device(dataset, config)
            self._source = ArraySource(dataset, seed, device, on_device)
            # Augmenting is cheaper than handing it to a thread, but a copy to the device is worth one.
            by_kind = 0 if on_device or device.type == "cpu" else PREFETCH_OF_FILES
        else:
            by_kind = PREFETCH_OF_FILES
        self._depth = by_kind if config.prefetch is None else config.prefetch
        if not isinstance(dataset, ArrayDataset):
            # The thread's consumer watches the clock itself.
            timeout_seconds = 0 if self._depth else config.data_timeout
            self._source = FileSource(
                dataset,
                seed,
                device,
                batch_size=batch_size,
                workers=config.workers or 0,
                timeout_seconds=timeout_seconds,
            )
        self._to_input = InputTransform(dataset.mean, dataset.std, dataset.image_size, device, memory_format)

    def _ahead(self, batches: Iterator[Batch], phase: str) -> Iterator[Batch]:
        if self._depth == 0:
            yield from batches
            return
        running = self._running = Prefetcher(
            batches, depth=self._depth, device=self._device, phase=phase, timeout_seconds=self._timeout_seconds
        )
        try:
            yield from running
        finally:
            if self._running is running:
                self._stop_thread()

    def _stop_thread(self) -> None:
        running, self._running = self._running, None
        if running is not None and not running.stop():
            self._source.close(at_once=True)

    @property
    def bad_images(self) -> list[ImageReadError]:
        """The pictures that this rank has skipped so far because they cannot be decoded, each once."""
        return list(self._source.bad_images.values())

    def close(self) -> None:
        """Stops the thread and the loader processes."""
        self._stop_thread()
        self._source.close()


class TrainLoader(_Loader):
    """The shuffled and augmented training images of one rank.

    What it gives is a pure function of (seed, epoch, number of the micro-batch): workers and prefetching do not enter,
    and the images of a global micro-batch are the same for any number of ranks with the same product with the
    micro-batch's size.

    Args:
        config: workers, prefetching, where images lie and cutout; `batch_size` is not read.
        micro_batch_size: images of a rank's batch; all batches are full.
        micro_batches_per_epoch: batches of an epoch, the same on every rank; images that fill none are left out, other
            ones in each epoch.
        seed: of order and augmentation.
        device: where the batches go.
        memory_format: of the images.

    Raises:
        ImageReadError: the images become resident, and one cannot be decoded.
    """

    def __init__(
        self,
        dataset: ArrayDataset | PictureDataset,
        config: DataConfig,
        *,
        micro_batch_size: int,
        micro_batches_per_epoch: int,
        rank: int,
        world_size: int,
        seed: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        bad_images = {}
        if becomes_resident(dataset, config):
            everything = torch.arange(len(dataset))
            dataset, bad_images = decode_all(dataset, everything, config, training=True, show_progress=rank == 0)
        super().__init__(dataset, config, micro_batch_size, seed, device, memory_format)
        self._source.bad_images.update(bad_images)
        self._num_images, self._image_size, self._cutout = len(dataset), dataset.image_size, config.cutout
        self._micro_batch_size, self._micro_batches_per_epoch = micro_batch_size, micro_batches_per_epoch
        self._rank, self._world_size, self._seed = rank, world_size, seed

    def epoch(self, epoch: int, first_micro_batch: int = 0, augment: bool = True) -> Iterator[Batch]:
        """Yields the epoch's batches from a position on: images float32, normalised, and labels, on the device.

        Without `augment` the images are seen as in validation; their order is the same. Batches are made ahead from
        the first one asked for until the iterator is exhausted, closed or dropped; two epochs cannot run at a time.

        Raises:
            ImageReadError: a picture cannot be decoded.
            LoaderError: a loader process died, or no batch came for `config.data_timeout` seconds.
        """
        order = epoch_order(self._seed, epoch, self._num_images)
        batches = rank_batches(
            order, self._micro_batch_size, self._micro_batches_per_epoch, self._rank, self._world_size
        )
        indices = list(torch.from_numpy(batches[first_micro_batch:]))
        phase = f"training epoch {epoch}"
        self._stop_thread()
        raw = self._source.batches(epoch if augment else None, indices, phase)
        yield from self._ahead(self._inputs(raw, epoch, indices if augment else ()), phase)

    def _inputs(self, raw: Iterator[Batch], epoch: int, augmented: Sequence[torch.Tensor]) -> Iterator[Batch]:
        if not (self._cutout and augmented):
            for images, labels in raw:
                yield self._to_input(images), labels
            return
        rng = cutout_generator(self._seed, epoch)
        table = CutoutTable.draw(
            rng, self._num_images, side=self._cutout, image_size=self._image_size, device=self._device
        )
        for (images, labels), chosen in zip(raw, to_device(augmented, self._device)):
            yield cutout(self._to_input(images), chosen, table), labels


class EvalLoader(_Loader):
    """One rank's share of the validation images: every `world_size`-th, in order, each exactly once.

    The last batch may be small, and a rank may have no image at all.

    Args:
        batch_size: images of a batch.
        config, device, memory_format: as in TrainLoader.

    Raises:
        ImageReadError: the images become resident, and one cannot be decoded.
    """

    def __init__(
        self,
        dataset: ArrayDataset | PictureDataset,
        config: DataConfig,
        *,
        batch_size: int,
        rank: int,
        world_size: int,
        device: torch.device,
        memory_format: torch.memory_format,
    ):
        share, bad_images = torch.arange(len(dataset))[rank::world_size], {}
        if becomes_resident(dataset, config):
            dataset, bad_images = decode_all(dataset, share, config, training=False, show_progress=rank == 0)
            share = torch.arange(len(dataset))
        super().__init__(dataset, config, batch_size, 0, device, memory_format)
        self._source.bad_images.update(bad_images)
        self._num_never_read = len(bad_images)
        self._indices = share.split(batch_size) if len(share) else ()

    def __len__(self) -> int:
        return len(self._indices)

    @property
    def num_left_out(self) -> int:
        """Images of this rank's share that the latest pass left out because they cannot be decoded."""
        return self._num_never_read + self._source.num_left_out

    def __iter__(self) -> Iterator[Batch]:
        phase = "validation"
        self._stop_thread()
        raw = self._source.batches(None, self._indices, phase)
        yield from self._ahead(((self._to_input(images), labels) for images, labels in raw), phase)
