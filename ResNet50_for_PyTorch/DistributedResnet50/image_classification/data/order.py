"""Which image comes when, and the random numbers of its augmentation: pure functions of (seed, epoch, image).

Nothing here knows workers or resume points, so neither can change what a run sees.
"""

import threading

import numpy as np

_of_thread = threading.local()
_ORDER_STREAM, _AUGMENT_STREAM, _CUTOUT_STREAM = 0, 1, 2


def _generator(seed: int, stream: int, epoch: int, image: int = 0) -> np.random.Generator:
    """A counter-based generator (Philox, Salmon et al. 2011).

    Seed and stream are its key, epoch and image the high words of its counter, so that streams never overlap and
    making one costs no warm-up.
    """
    # numpy would make a list with a large and a small integer into floats.
    key = np.array([seed % 2**64, stream], dtype=np.uint64)
    counter = np.array([0, 0, image, epoch], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


def epoch_order(seed: int, epoch: int, num_images: int) -> np.ndarray:
    """The epoch's permutation of all images: `[num_images]`, int64."""
    return _generator(seed, _ORDER_STREAM, epoch).permutation(num_images)


def rank_batches(
    order: np.ndarray, micro_batch_size: int, num_micro_batches: int, rank: int, world_size: int
) -> np.ndarray:
    """The images of one rank, `[num_micro_batches, micro_batch_size]`.

    Global micro-batch m is `order[m * B * R:(m + 1) * B * R]`, of which rank r takes the r-th slice of B. The end of
    the order that fills no global micro-batch is left out. The same images make a global batch for any number of
    ranks with the same product B * R.
    """
    used = num_micro_batches * micro_batch_size * world_size
    assert used <= len(order), "the plan asks for more images than there are"
    return order[:used].reshape(num_micro_batches, world_size, micro_batch_size)[:, rank]


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """Random numbers for the augmentation of a whole epoch, drawn as tables with a row for each image."""
    return _generator(seed, _AUGMENT_STREAM, epoch)


def cutout_generator(seed: int, epoch: int) -> np.random.Generator:
    """Random numbers for the cutout of a whole epoch, so that it changes no other draw."""
    return _generator(seed, _CUTOUT_STREAM, epoch)


def image_generator(seed: int, epoch: int, image: int) -> np.random.Generator:
    """Random numbers for the augmentation of one image in one epoch.

    A thread gets the same object each time, at another place of its stream: use it up before the next call.
    """
    # Making a generator takes ten times as long as moving one: numpy asks the system for entropy that is not used.
    if not hasattr(_of_thread, "generator"):
        _of_thread.generator = _generator(0, _AUGMENT_STREAM, 0)
        _of_thread.start = _of_thread.generator.bit_generator.state
    counter_and_key = _of_thread.start["state"]
    counter_and_key["key"][0] = seed % 2**64
    # Image 0 of the counter is the epoch's own generator.
    counter_and_key["counter"][2:] = image + 1, epoch
    _of_thread.generator.bit_generator.state = _of_thread.start
    return _of_thread.generator
