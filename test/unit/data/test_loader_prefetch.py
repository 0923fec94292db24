"""Batches made ahead: the same ones, errors where they belong, and nothing left behind."""

import gc
import multiprocessing
import os
import signal
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from image_classification.config import DataConfig
from image_classification.data import ArrayDataset, EvalLoader, LoaderError, TrainLoader, explain_loader_failure, limits
from image_classification.data import prefetch as prefetch_module
from image_classification.data.order import epoch_order
from image_classification.data.prefetch import Prefetcher
from image_classification.data.sources import FileSource

CPU = torch.device("cpu")
ONES = (1.0, 1.0, 1.0)


class Files:
    """Stands for a folder of 4x4 pictures: image i is grey level i mod 256; `hook(i)` runs in whoever reads it."""

    split, image_size, small_images, mean, std = "train", 4, False, ONES, ONES

    def __init__(self, num_images, hook=lambda index: None):
        self.num_images, self.hook = num_images, hook

    def __len__(self):
        return self.num_images

    def sample(self, index, seed, epoch):
        self.hook(index)
        return (np.full((4, 4, 3), (index + (epoch or 0)) % 256, np.uint8), index), []


def train_loader(dataset, batch=4, **options):
    return TrainLoader(
        dataset,
        DataConfig(**{"workers": 0} | options),
        micro_batch_size=batch,
        micro_batches_per_epoch=len(dataset) // batch,
        rank=0,
        world_size=1,
        seed=0,
        device=CPU,
        memory_format=torch.channels_last,
    )


def same(one, other) -> bool:
    return len(one) == len(other) and all(
        torch.equal(a, b) for pair in zip(one, other, strict=True) for a, b in zip(*pair, strict=True)
    )


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "prefetch"]


def counted(num_batches: int, produced: list):
    for number in range(num_batches):
        produced.append(number)
        yield torch.full((2,), number), torch.tensor([number])


def prefetcher(batches, depth=2, timeout_seconds=60.0):
    return Prefetcher(batches, depth=depth, device=CPU, phase="training epoch 3", timeout_seconds=timeout_seconds)


def wait_for(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.integers(0, 2), st.integers(0, 3), st.integers(1, 7), st.integers(7, 60), st.integers(0, 5), st.integers(0, 9)
)
def test_batches_are_the_same_for_any_workers_and_depth(workers, depth, batch, num_images, epoch, first):
    dataset = Files(num_images)
    alone, loader = (
        train_loader(dataset, batch, prefetch=0),
        train_loader(dataset, batch, workers=workers, prefetch=depth),
    )
    first = min(first, num_images // batch)
    try:
        assert same(list(alone.epoch(epoch)), list(loader.epoch(epoch)))
        assert same(list(alone.epoch(epoch + 1, first)), list(loader.epoch(epoch + 1, first)))
    finally:
        loader.close()
    assert threads() == []


@pytest.mark.parametrize("options", [{}, {"cutout": 3}])
def test_images_in_memory_are_the_same_with_a_thread(options):
    pixels = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (50, 3, 8, 8), dtype=np.uint8))
    dataset = ArrayDataset(pixels, torch.arange(50), 8, ONES, ONES, pad=1, flip=True)
    expected = list(train_loader(dataset, 8, prefetch=0, **options).epoch(3))
    assert same(expected, list(train_loader(dataset, 8, prefetch=2, **options).epoch(3)))
    assert same(expected, list(train_loader(dataset, 8, prefetch=1, resident="host", **options).epoch(3)))


def test_no_more_than_depth_batches_wait():
    produced = []
    running = prefetcher(counted(20, produced), depth=3)
    wait_for(lambda: len(produced) == 4)  # three wait, and one is in the thread's hands
    time.sleep(0.1)
    assert len(produced) == 4
    assert next(running)[1].item() == 0
    wait_for(lambda: len(produced) == 5)
    assert running.stop() and len(produced) == 5


def test_it_works_while_the_caller_does():
    produced = []
    running = prefetcher(counted(5, produced))
    assert next(running)[1].item() == 0
    wait_for(lambda: 2 in produced)
    assert [labels.item() for _, labels in running] == [1, 2, 3, 4]
    wait_for(lambda: not threads())


def test_an_error_comes_after_the_batches_before_it():
    def failing():
        yield from counted(2, [])
        raise ZeroDivisionError("in the thread")

    running = prefetcher(failing())
    assert [next(running)[1].item() for _ in range(2)] == [0, 1]
    with pytest.raises(ZeroDivisionError, match="in the thread"):
        next(running)
    wait_for(lambda: not threads())


@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_error_in_reading_ends_the_epoch(prefetch):
    def hook(index):
        if index == 7:
            raise ZeroDivisionError("picture 7")

    with pytest.raises(ZeroDivisionError, match="picture 7"):
        list(train_loader(Files(24, hook), prefetch=prefetch).epoch(0))
    assert threads() == []


def test_leaving_an_epoch_early_ends_the_thread_and_frees_the_batches():
    loader = train_loader(Files(40))
    epoch = loader.epoch(0)
    images = next(epoch)[0]
    waiting = loader._running._ready
    wait_for(waiting.full)
    kept = [weakref.ref(batch[0]) for batch, _ in waiting.queue]
    assert all(ref() is not None for ref in kept) and len(kept) == 2
    started = time.monotonic()
    epoch.close()
    assert time.monotonic() - started < 1 and threads() == []
    gc.collect()
    assert all(ref() is None for ref in kept)
    assert images.shape == (4, 3, 4, 4)


def test_dropping_or_closing_ends_the_thread():
    loader = train_loader(Files(40))
    for _ in loader.epoch(0):
        break
    gc.collect()
    assert threads() == []
    epoch = loader.epoch(1)
    next(epoch)
    assert threads() == ["prefetch"]
    loader.close()
    assert threads() == []


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_epoch_ends_the_first(workers):
    loader, alone = train_loader(Files(40), workers=workers), train_loader(Files(40), prefetch=0)
    first = loader.epoch(0)
    next(first)
    assert same(list(loader.epoch(1)), list(alone.epoch(1)))
    first.close()
    assert threads() == []
    loader.close()


def test_an_epoch_left_inside_a_batch_does_not_write_into_the_next(monkeypatch):
    """Without loader processes the thread that is left behind goes on reading."""
    monkeypatch.setattr(prefetch_module, "PATIENCE_SECONDS", 0.01)
    loader, alone = train_loader(Files(24, lambda _: time.sleep(0.02))), train_loader(Files(24), prefetch=0)
    for epoch in range(3):
        left = loader.epoch(epoch)
        next(left)
        left.close()
        assert same(list(loader.epoch(epoch + 1)), list(alone.epoch(epoch + 1)))
    wait_for(lambda: not threads())


def test_a_loader_process_that_hangs_in_an_epoch_that_is_left_does_not_hold_up_the_next():
    fifth_batch = epoch_order(0, 0, 40)[16:20]
    loader = train_loader(Files(40, HangsOnce(fifth_batch)), workers=2, data_timeout=30)
    try:
        left = loader.epoch(0)
        next(left)
        left.close()
        assert same(list(loader.epoch(1)), list(train_loader(Files(40), prefetch=0).epoch(1)))
    finally:
        loader.close()


class HangsOnce:
    """Sleeps at the first of these images that any process reads."""

    def __init__(self, images):
        self._images, self._hung = set(images.tolist()), multiprocessing.get_context("fork").Value("b", 0)

    def __call__(self, index):
        if index in self._images and not self._hung.value:
            self._hung.value = 1
            time.sleep(3600)


def test_twenty_short_epochs_never_stall():
    started = time.monotonic()
    train, val = train_loader(Files(12), workers=2, data_timeout=30), validation(Files(7), workers=2)
    try:
        for epoch in range(20):
            assert len(list(train.epoch(epoch))) == 3
            assert sum(len(labels) for _, labels in val) == 7
    finally:
        train.close()
        val.close()
    assert threads() == []
    assert time.monotonic() - started < 55


def validation(dataset, **options):
    return EvalLoader(
        dataset,
        DataConfig(**{"workers": 0} | options),
        batch_size=4,
        rank=0,
        world_size=1,
        device=CPU,
        memory_format=torch.channels_last,
    )


def sleeps(index):
    if index == 7:
        time.sleep(3600)


@pytest.mark.parametrize("workers, prefetch", [(0, 2), (1, 2), (1, 0)])
def test_a_read_that_hangs_ends_the_run(workers, prefetch, monkeypatch):
    monkeypatch.setattr(prefetch_module, "PATIENCE_SECONDS", 0.2)
    options = {"workers": workers, "prefetch": prefetch, "data_timeout": 0.5}
    train, val = train_loader(Files(24, sleeps), **options), validation(Files(24, sleeps), **options)
    started = time.monotonic()
    try:
        with pytest.raises(LoaderError, match=r"^training epoch 3: no batch came for 0.5 s; .*--data_timeout"):
            list(train.epoch(3))
        with pytest.raises(LoaderError, match=r"^validation: no batch came for 0.5 s"):
            list(val)
    finally:
        train.close()
        val.close()
        # The thread of a read that hangs in this process cannot be ended; it is a daemon.
        for thread in threading.enumerate():
            if thread.name == "prefetch":
                thread.name = "hanging"
    assert time.monotonic() - started < 30


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("number, reason", [(signal.SIGKILL, "memory"), (signal.SIGBUS, "shared memory")])
def test_a_loader_process_that_dies_is_told(prefetch, number, reason):
    def dies(index):
        if index == 7:
            if number != signal.SIGKILL:  # torch's own handler for it would write to stderr first
                signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    loader = train_loader(Files(24, dies), workers=1, prefetch=prefetch)
    try:
        # torch's handler of SIGCHLD may be first, wherever the main thread then is.
        with pytest.raises(RuntimeError) as caught:
            for _ in loader.epoch(0):
                pass
        line = explain_loader_failure(str(caught.value)) or str(caught.value)
        assert f"was killed by {number.name}" in line and reason in line and "--workers" in line
    finally:
        loader.close()
    assert threads() == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux forks them")
def test_loader_processes_are_forked_in_a_rank_that_was_spawned():
    """The launcher spawns ranks, whose processes would be spawned in turn: 250 MB and a start of seconds for each."""
    usual = multiprocessing.get_start_method()
    multiprocessing.set_start_method("spawn", force=True)
    try:
        loader = train_loader(Files(12), workers=1)
        assert len(list(loader.epoch(0))) == 3
        (worker,) = loader._source._loader._iterator._workers
        command = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in (worker.pid, os.getpid())]
        assert command[0] == command[1]
    finally:
        multiprocessing.set_start_method(usual, force=True)
        loader.close()


def test_file_handles_are_not_underestimated():
    """What a rank's two loaders open in this process, against what the check asks for."""
    workers, before = 2, limits._open_handles()
    sources = [FileSource(Files(40), 0, CPU, batch_size=2, workers=workers, timeout_seconds=60) for _ in range(2)]
    indices = torch.arange(40).split(2)
    for source in sources:
        assert sum(len(labels) for _, labels in source.batches(0, indices, "epoch")) == 40
    opened = limits._open_handles() - before
    for source in sources:
        source.close()
    assert workers <= opened <= limits.NUM_LOADERS * workers * limits.HANDLES_PER_WORKER + limits.SPARE_HANDLES
