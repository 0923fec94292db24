"""The order of the images: a pure function of (seed, epoch), shared out over ranks with nothing twice."""

from concurrent.futures import ThreadPoolExecutor
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from image_classification.config import DataConfig
from image_classification.data import ArrayDataset, EvalLoader, TrainLoader
from image_classification.data.order import (
    cutout_generator,
    epoch_generator,
    epoch_order,
    image_generator,
    rank_batches,
)

seeds, epochs = st.integers(-5, 2**40), st.integers(0, 500)


@given(seeds, epochs, st.integers(1, 400))
def test_order_is_a_permutation_and_repeatable(seed, epoch, num_images):
    order = epoch_order(seed, epoch, num_images)
    assert sorted(order) == list(range(num_images))
    assert np.array_equal(order, epoch_order(seed, epoch, num_images))


@given(seeds, epochs)
def test_order_differs_by_epoch_and_seed(seed, epoch):
    order = epoch_order(seed, epoch, 200)
    assert not np.array_equal(order, epoch_order(seed, epoch + 1, 200))
    assert not np.array_equal(order, epoch_order(seed + 1, epoch, 200))


@given(st.integers(1, 6), st.integers(1, 8), st.integers(0, 30), st.integers(0, 400))
def test_ranks_share_the_order_out(world_size, micro_batch_size, num_micro_batches, left_out):
    used = num_micro_batches * micro_batch_size * world_size
    order = epoch_order(0, 0, used + left_out)
    ranks = [rank_batches(order, micro_batch_size, num_micro_batches, rank, world_size) for rank in range(world_size)]
    assert all(batches.shape == (num_micro_batches, micro_batch_size) for batches in ranks)
    # One rank after the other within each global micro-batch: the order itself, whatever the number of ranks.
    assert np.array_equal(np.stack(ranks, axis=1).flatten(), order[:used])


def numbered(num_images: int) -> ArrayDataset:
    """One black pixel each; what counts is the label, the image's number."""
    pixels = torch.zeros(1, 3, 1, 1, dtype=torch.uint8)
    return ArrayDataset(pixels, torch.arange(num_images), 1, (0.0,) * 3, (1.0,) * 3)


def numbers(batches) -> list[list[int]]:
    return [labels.tolist() for _, labels in batches]


def loader_options(rank, ranks, **options):
    common = {"rank": rank, "world_size": ranks, "device": torch.device("cpu"), "memory_format": torch.channels_last}
    return common | options


def train_numbers(num_images, batch, rank, ranks, seed, epoch, first=0, prefetch=0):
    """What the loader of one rank gives, as image numbers by batch."""
    options = loader_options(
        rank, ranks, micro_batch_size=batch, micro_batches_per_epoch=num_images // (batch * ranks), seed=seed
    )
    loader = TrainLoader(numbered(num_images), DataConfig(prefetch=prefetch), **options)
    return numbers(loader.epoch(epoch, first))


plans = st.integers(1, 6).flatmap(  # ranks, images of a rank's batch, images
    lambda ranks: st.integers(1, 9).flatmap(
        lambda batch: st.tuples(st.just(ranks), st.just(batch), st.integers(ranks * batch, 300))
    )
)


@settings(deadline=None)
@given(plans, seeds, epochs, st.integers(0, 10**6))
def test_an_epoch_of_all_ranks(plan, seed, epoch, somewhere):
    """Disjoint over ranks, all images but count mod global batch, the same again, and from any position on."""
    ranks, batch, num_images = plan
    shares = [train_numbers(num_images, batch, rank, ranks, seed, epoch) for rank in range(ranks)]
    steps = num_images // (ranks * batch)
    assert all(len(share) == steps and all(len(numbers) == batch for numbers in share) for share in shares)
    seen = [number for share in shares for numbers in share for number in numbers]
    assert len(set(seen)) == len(seen) == num_images - num_images % (ranks * batch)
    assert set(seen) == set(epoch_order(seed, epoch, num_images)[: len(seen)].tolist())
    rank, first = somewhere % ranks, somewhere % (steps + 1)
    assert train_numbers(num_images, batch, rank, ranks, seed, epoch, first) == shares[rank][first:]


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(0, 40), seeds, epochs)
def test_a_global_batch_is_the_same_on_any_number_of_ranks(ranks, other_ranks, batch, extra, seed, epoch):
    global_batch = ranks * other_ranks * batch
    num_images = 3 * global_batch + extra
    few, many = (
        [train_numbers(num_images, global_batch // world, rank, world, seed, epoch) for rank in range(world)]
        for world in (ranks, other_ranks)
    )
    assert [list(chain(*step)) for step in zip(*few)] == [list(chain(*step)) for step in zip(*many)]


@settings(deadline=None, max_examples=20)
@given(plans, seeds, epochs, st.integers(1, 4))
def test_prefetching_does_not_enter(plan, seed, epoch, depth):
    ranks, batch, num_images = plan
    arguments = num_images, batch, ranks - 1, ranks, seed, epoch
    assert train_numbers(*arguments, prefetch=depth) == train_numbers(*arguments)


@settings(deadline=None)
@given(st.integers(1, 9), st.integers(1, 50), st.integers(1, 200))
def test_validation_takes_every_image_once(ranks, batch, num_images):
    seen = []
    for rank in range(ranks):
        loader = EvalLoader(numbered(num_images), DataConfig(), **loader_options(rank, ranks, batch_size=batch))
        share = numbers(loader)
        assert len(share) == len(loader) and all(1 <= len(part) <= batch for part in share)
        seen += [number for part in share for number in part]
    assert sorted(seen) == list(range(num_images))


def test_more_images_than_there_are():
    with pytest.raises(AssertionError):
        rank_batches(epoch_order(0, 0, 15), 4, 2, 0, 2)


def test_left_out_images_change_with_the_epoch():
    left_out = {frozenset(epoch_order(0, epoch, 100)[96:]) for epoch in range(10)}
    assert len(left_out) > 5


def test_an_image_draws_the_same_whatever_was_drawn_before():
    draws = image_generator(5, 4, 3).random(4)
    rng = image_generator(5, 4, 2)
    rng.random(3), rng.integers(10, dtype=np.int32)  # both leave the generator with something at hand
    assert np.array_equal(image_generator(5, 4, 3).random(4), draws)
    with ThreadPoolExecutor(1) as other:
        assert other.submit(image_generator, 5, 4, 3).result() is not image_generator(5, 4, 3)


def test_random_numbers_never_meet():
    draws = [
        image_generator(seed, epoch, image).random(4) for seed in range(3) for epoch in range(3) for image in range(50)
    ]
    whole_epochs = (epoch_generator, cutout_generator)
    draws += [make(seed, epoch).random(4) for make in whole_epochs for seed in range(3) for epoch in range(3)]
    assert len(np.unique(np.concatenate(draws))) == 4 * len(draws)
    assert np.array_equal(image_generator(2, 1, 7).random(4), draws[2 * 150 + 1 * 50 + 7])
