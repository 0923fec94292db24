"""Batches of both kinds of data set: the same ones whatever the ranks, workers and resume points."""

import contextlib
import os
import random
import signal
import time

import numpy as np
import pytest
import torch

from image_classification.config import DataConfig
from image_classification.data import (
    ArrayDataset,
    EvalLoader,
    ImageReadError,
    TrainLoader,
    detect_layout,
    open_datasets,
)

CPU = torch.device("cpu")
ONES = (1.0, 1.0, 1.0)


def numbered(num_images: int, pad=1, flip=True) -> ArrayDataset:
    """Random images whose label is their own number."""
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (num_images, 3, 8, 8), dtype=np.uint8))
    return ArrayDataset(images, torch.arange(num_images), 8, ONES, ONES, pad, flip)


@pytest.fixture(params=["arrays", "folder"])
def dataset(request, tmp_path, make):
    """24 images, in memory and as files."""
    if request.param == "arrays":
        return numbered(24)
    layout = detect_layout(str(make.folder(tmp_path)))
    return open_datasets(layout, DataConfig(), 16).train


def train_loader(
    dataset, batch, per_epoch, rank=0, ranks=1, seed=0, workers=0, memory_format=torch.channels_last, **options
):
    return TrainLoader(
        dataset,
        DataConfig(workers=workers, **{"resident": "off"} | options),
        micro_batch_size=batch,
        micro_batches_per_epoch=per_epoch,
        rank=rank,
        world_size=ranks,
        seed=seed,
        device=CPU,
        memory_format=memory_format,
    )


def eval_loader(dataset, batch, rank=0, ranks=1, workers=0, **options):
    return EvalLoader(
        dataset,
        DataConfig(workers=workers, **{"resident": "off"} | options),
        batch_size=batch,
        rank=rank,
        world_size=ranks,
        device=CPU,
        memory_format=torch.contiguous_format,
    )


def joined(batches) -> tuple[torch.Tensor, torch.Tensor]:
    images, labels = zip(*batches)
    return torch.cat(images), torch.cat(labels)


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_batches_are_the_networks_input(dataset, memory_format):
    batches = list(train_loader(dataset, 5, 4, memory_format=memory_format).epoch(0))
    assert len(batches) == 4
    for images, labels in batches:
        assert images.shape == (5, 3, dataset.image_size, dataset.image_size)
        assert images.dtype == torch.float32 and images.is_contiguous(memory_format=memory_format)
        assert labels.shape == (5,) and labels.dtype == torch.int64


def test_any_number_of_ranks_sees_the_same_global_batches(dataset):
    whole = list(train_loader(dataset, 12, 2).epoch(3))
    for ranks in (2, 3, 4):
        loaders = [train_loader(dataset, 12 // ranks, 2, rank, ranks) for rank in range(ranks)]
        for expected, parts in zip(whole, zip(*(loader.epoch(3) for loader in loaders)), strict=True):
            assert same(joined(parts), expected)


def test_resuming_inside_an_epoch_gives_the_rest_of_it(dataset):
    whole = list(train_loader(dataset, 4, 6).epoch(2))
    rest = list(train_loader(dataset, 4, 6).epoch(2, first_micro_batch=4))
    assert len(rest) == 2 and same(joined(rest), joined(whole[4:]))
    assert list(train_loader(dataset, 4, 6).epoch(2, first_micro_batch=6)) == []


def test_epochs_and_seeds_differ_and_epochs_come_back(dataset):
    loader = train_loader(dataset, 8, 3)
    first, second = joined(loader.epoch(0)), joined(loader.epoch(1))
    assert not torch.equal(first[0], second[0])
    assert not torch.equal(first[0], joined(train_loader(dataset, 8, 3, seed=1).epoch(0))[0])
    assert same(joined(loader.epoch(0)), first)


def test_augmentation_differs_by_epoch(dataset):
    loader = train_loader(dataset, 8, 3)
    epochs = [{image.numpy().tobytes() for image in joined(loader.epoch(epoch))[0]} for epoch in range(2)]
    # Both epochs hold all 24 images: without new draws they would be the same set.
    assert len(epochs[0] & epochs[1]) < 12


def test_without_augmentation_images_are_those_of_validation_in_the_order_of_training(dataset):
    plain, views = train_loader(dataset, 24, 1), joined(eval_loader(dataset, 24))
    images, labels = joined(plain.epoch(1, augment=False))
    assert torch.equal(labels, joined(plain.epoch(1))[1])
    expected = {image.numpy().tobytes() for image in views[0]}
    assert {image.numpy().tobytes() for image in images} == expected
    assert {image.numpy().tobytes() for image in joined(plain.epoch(1))[0]} != expected


def test_an_epoch_takes_every_image_once_but_the_left_out():
    loader = train_loader(numbered(50), 4, 12)
    labels = joined(loader.epoch(0))[1]
    assert len(set(labels.tolist())) == len(labels) == 48


def test_augmentation_belongs_to_the_image_not_to_its_place():
    data = numbered(24)
    by_fours, by_sixes = (joined(train_loader(data, n, 24 // n, rank=0).epoch(7)) for n in (4, 6))
    assert same(by_fours, by_sixes)
    whole = dict(zip(by_fours[1].tolist(), by_fours[0]))
    half = joined(train_loader(data, 3, 4, rank=1, ranks=2).epoch(7))
    assert all(torch.equal(image, whole[label]) for label, image in zip(half[1].tolist(), half[0]))


def test_without_pad_and_flip_images_come_as_they_are():
    data = numbered(20, pad=0, flip=False)
    images, labels = joined(train_loader(data, 5, 4).epoch(0))
    torch.testing.assert_close(images, (data.images[labels].float() - 255) / 255)


def test_the_callers_random_numbers_are_left_alone(dataset):
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    list(train_loader(dataset, 4, 6).epoch(0))
    list(eval_loader(dataset, 4))
    assert states == (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist())


@pytest.mark.parametrize("ranks", [1, 3, 4, 30])
@pytest.mark.parametrize("batch", [1, 4, 7, 64])
def test_validation_takes_every_image_exactly_once(ranks, batch):
    data = numbered(10)
    shares = [list(eval_loader(data, batch, rank, ranks)) for rank in range(ranks)]
    labels = [label for share in shares for _, batch_labels in share for label in batch_labels.tolist()]
    assert sorted(labels) == list(range(10))
    assert all(1 <= len(batch_labels) <= batch for share in shares for _, batch_labels in share)
    for share in shares:
        for images, batch_labels in share:
            torch.testing.assert_close(images, (data.images[batch_labels].float() - 255) / 255)


def test_validation_of_files_is_exact_and_repeatable(tmp_path, make):
    data = open_datasets(detect_layout(str(make.folder(tmp_path))), DataConfig(), 16).val
    loaders = [eval_loader(data, 3, rank, 4) for rank in range(4)]
    first, second = ([joined(loader) for loader in loaders] for _ in range(2))
    assert sum(len(labels) for _, labels in first) == 10
    assert torch.bincount(torch.cat([labels for _, labels in first])).tolist() == [4, 3, 3]
    assert all(same(a, b) for a, b in zip(first, second))
    assert list(eval_loader(data, 3, rank=11, ranks=12)) == [] == list(eval_loader(data, 3, 11, 12, workers=1))


def test_images_are_resized_to_the_networks_input():
    corner = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    corner[:, :, 0, 0] = 255
    for size in (12, 2):
        ((images, _),) = eval_loader(ArrayDataset(corner, torch.zeros(1).long(), size, ONES, ONES), 6)
        assert images.shape == (1, 3, size, size)
        # Enlarged or shrunk with antialiasing, the corner is still there; -1 is black.
        assert (images[0, :, 0, 0] > -0.99).all() and (images[0, :, -1, -1] == -1).all()


@pytest.fixture
def files(tmp_path, make):
    return open_datasets(detect_layout(str(make.folder(tmp_path))), DataConfig(), 16)


def worker_pids(loader) -> list[int]:
    return [worker.pid for worker in loader._source._loader._iterator._workers]


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_workers_change_nothing_and_live_until_close(files):
    loader, alone = train_loader(files.train, 4, 6, workers=2), train_loader(files.train, 4, 6)
    first = joined(loader.epoch(0))
    pids = worker_pids(loader)
    assert same(first, joined(alone.epoch(0)))
    assert same(joined(loader.epoch(1)), joined(alone.epoch(1)))
    assert worker_pids(loader) == pids and all(map(is_running, pids))
    # An epoch that is left early does not leak into the next one, which has processes of its own.
    next(loader.epoch(1))
    assert same(joined(loader.epoch(2, first_micro_batch=1)), joined(alone.epoch(2, first_micro_batch=1)))
    assert not any(map(is_running, pids))
    pids = worker_pids(loader)
    loader.close()
    assert not any(map(is_running, pids))
    loader.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_workers_live_on_where_training_takes_exactly_its_batches(files, prefetch):
    """It never asks for one more, so no iterator ends by itself."""
    loader = train_loader(files.train, 4, 6, workers=1, prefetch=prefetch)
    pids = set()
    for epoch in range(3):
        batches = loader.epoch(epoch)
        for _ in range(6):
            next(batches)
        pids.update(worker_pids(loader))
    assert len(pids) == 1
    loader.close()


def test_interrupt_leaves_workers_to_the_rank(files):
    loader = eval_loader(files.val, 2, workers=1)
    first = joined(loader)
    (pid,) = worker_pids(loader)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert same(joined(loader), first) and worker_pids(loader) == [pid]
    loader.close()


def test_workers_end_by_sigterm_whatever_the_rank_does_with_it(files):
    loader = eval_loader(files.val, 2, workers=1)
    earlier = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        list(loader)
        (worker,) = loader._source._loader._iterator._workers
        # torch's handler of SIGCHLD reports the death as a RuntimeError, at whatever moment it arrives.
        with contextlib.suppress(RuntimeError):
            worker.terminate()
            worker.join(10)
        worker.join(10)
        assert worker.exitcode == -signal.SIGTERM
    finally:
        signal.signal(signal.SIGTERM, earlier)
        loader.close()


def test_workers_can_be_spawned(files):
    """Python 3.14 no longer forks by default, so everything that a worker needs must survive pickling."""
    loader = train_loader(files.train, 4, 2, workers=1)
    loader._source._loader.multiprocessing_context = "spawn"
    assert same(joined(loader.epoch(0)), joined(train_loader(files.train, 4, 2).epoch(0)))
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_unreadable_picture_ends_the_epoch_with_its_name(files, workers):
    path = files.train.path(13)
    path.write_bytes(path.read_bytes()[:700])
    loader = train_loader(files.train, 4, 6, workers=workers)
    with pytest.raises(ImageReadError) as caught:
        list(loader.epoch(0))
    assert str(caught.value) == f"cannot read image {path} (class bee, train): truncated"
    loader.close()
