"""The order of the images: the same for any number of ranks and any resume point, another one each epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from image_classification.data.order import epoch_generator, epoch_order, image_generator, rank_batches

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


def test_more_images_than_there_are():
    with pytest.raises(AssertionError):
        rank_batches(epoch_order(0, 0, 15), 4, 2, 0, 2)


def test_left_out_images_change_with_the_epoch():
    left_out = {frozenset(epoch_order(0, epoch, 100)[96:]) for epoch in range(10)}
    assert len(left_out) > 5


def test_random_numbers_never_meet():
    draws = [
        image_generator(seed, epoch, image).random(4) for seed in range(3) for epoch in range(3) for image in range(50)
    ]
    draws += [epoch_generator(seed, epoch).random(4) for seed in range(3) for epoch in range(3)]
    assert len(np.unique(np.concatenate(draws))) == 4 * len(draws)
    assert np.array_equal(image_generator(2, 1, 7).random(4), draws[2 * 150 + 1 * 50 + 7])
