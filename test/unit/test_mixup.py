"""Mixup and cutmix against plain numpy."""

import itertools

import numpy as np
import pytest
import torch

from image_classification.losses import cross_entropy
from image_classification.mixup import Mixup

NUM_IMAGES, NUM_CLASSES, HEIGHT, WIDTH = 5, 7, 12, 16


def mixup_of(mixup_alpha=0.0, cutmix_alpha=0.0, seed=3, rank=1, stop_step=10**6):
    return Mixup(mixup_alpha, cutmix_alpha, num_classes=NUM_CLASSES, seed=seed, rank=rank, stop_step=stop_step)


@pytest.fixture
def batch():
    images = torch.randn(NUM_IMAGES, 3, HEIGHT, WIDTH, generator=torch.Generator().manual_seed(0))
    return images, torch.tensor([4, 4, 0, 6, 2])


def lambda_of(labels, targets):
    """Read from an image whose neighbour has another label; image 0 comes after the last one."""
    assert labels[0] != labels[-1]
    return targets[0, labels[0]].item()


def expected_targets(labels, lam):
    targets = np.zeros((len(labels), NUM_CLASSES))
    for i in range(len(labels)):
        targets[i, labels[i]] += lam
        targets[i, labels[i - 1]] += 1 - lam
    return targets


@pytest.mark.parametrize("step", range(4))
def test_mixup_is_the_weighted_sum_of_neighbours(batch, step):
    images, labels = batch
    rng = np.random.default_rng((3, step, 1, 2))
    lam = rng.beta(0.4, 0.4)
    pixels = images.numpy().astype(np.float64)
    expected = np.stack([lam * pixels[i] + (1 - lam) * pixels[i - 1] for i in range(NUM_IMAGES)])
    mixed, targets = mixup_of(0.4)(images, labels, step, position=2)
    np.testing.assert_allclose(mixed, expected, atol=1e-6)
    np.testing.assert_allclose(targets, expected_targets(labels, lam), atol=1e-7)
    assert (mixed.dtype, targets.dtype) == (torch.float32, torch.float32)


def expected_box(lam, rng):
    """Top, bottom, left, right; the centre's row is drawn first (Yun et al. 2019, equation 2, and their code)."""
    edges = []
    for size in (HEIGHT, WIDTH):
        length, centre = int(size * np.sqrt(1 - lam)), rng.integers(size)
        edges += [int(np.clip(centre - length // 2, 0, size)), int(np.clip(centre + length // 2, 0, size))]
    return edges


def test_cutmix_pastes_a_box_of_the_neighbour_and_counts_its_pixels(batch):
    images, labels = batch
    cut_by_the_edge = 0
    for step in range(40):
        rng = np.random.default_rng((3, step, 1, 0))
        lam = rng.beta(1.0, 1.0)
        top, bottom, left, right = expected_box(lam, rng)
        expected = images.clone()
        for i in range(NUM_IMAGES):
            expected[i, :, top:bottom, left:right] = images[i - 1, :, top:bottom, left:right]
        mixed, targets = mixup_of(cutmix_alpha=1.0)(images, labels, step, 0)
        assert torch.equal(mixed, expected)
        share_of_own = (mixed == images).double().mean().item()
        np.testing.assert_allclose(targets, expected_targets(labels, share_of_own), atol=1e-6)
        cut_by_the_edge += abs(share_of_own - lam) > 0.1
    assert 5 < cut_by_the_edge < 35  # so the correction of lambda was at work, and not in all


@pytest.mark.parametrize("alphas", [(0.3, 0.0), (0.0, 1.0)])
def test_the_loss_is_the_weighted_sum_of_two_hard_ones(batch, alphas):
    images, labels = batch
    logits = torch.randn(NUM_IMAGES, NUM_CLASSES, generator=torch.Generator().manual_seed(1))
    for step in range(5):
        _, targets = mixup_of(*alphas)(images, labels, step, 0)
        lam = lambda_of(labels, targets)
        for smoothing in (0.0, 0.1):
            hard, of_neighbour = (cross_entropy(logits, y, smoothing) for y in (labels, labels.roll(1)))
            soft = cross_entropy(logits, targets, smoothing)
            torch.testing.assert_close(soft, lam * hard + (1 - lam) * of_neighbour)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 4.0])
def test_lambda_has_the_moments_of_beta(batch, alpha):
    lams = np.array([lambda_of(batch[1], mixup_of(alpha)(*batch, step, 0)[1]) for step in range(2000)])
    variance = 1 / (4 * (2 * alpha + 1))  # of Beta(a, a), whose mean is 1/2
    assert lams.mean() == pytest.approx(0.5, abs=4 * np.sqrt(variance / len(lams)))
    assert lams.var() == pytest.approx(variance, rel=0.1)
    assert ((lams >= 0) & (lams <= 1)).all()


def test_with_both_each_is_taken_half_of_the_time(batch):
    images, labels = batch
    num_cut = sum(
        torch.isin(mixup_of(0.2, 1.0)(images, labels, step, 0)[0], images).all().item() for step in range(400)
    )
    assert num_cut == pytest.approx(200, abs=40)


def test_draws_are_a_function_of_seed_step_rank_and_position(batch):
    def draw(seed, step, rank, position):
        return mixup_of(0.2, 1.0, seed=seed, rank=rank)(*batch, step, position)

    places = list(itertools.product((0, 1), repeat=4))
    first = {place: draw(*place) for place in places}
    np.random.seed(1)
    torch.manual_seed(1)
    for place in reversed(places):  # as a resumed run: in another order, by other objects
        again = draw(*place)
        assert all(torch.equal(*pair) for pair in zip(again, first[place], strict=True))
    assert len({tuple(images.flatten().tolist()) for images, _ in first.values()}) == len(places)


def test_from_the_stop_on_batches_pass_unchanged(batch):
    mixup = mixup_of(0.2, 1.0, stop_step=5)
    assert mixup(*batch, 4, 0)[1].shape == (NUM_IMAGES, NUM_CLASSES)
    for step in (5, 6):
        images, labels = mixup(*batch, step, 0)
        assert images is batch[0] and labels is batch[1]


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_batch_is_left_alone_and_its_memory_format_kept(batch, alphas, memory_format):
    images, labels = batch[0].contiguous(memory_format=memory_format), batch[1]
    before = images.clone(), labels.clone()
    for step in range(5):
        mixed, _ = mixup_of(*alphas)(images, labels, step, 0)
        assert mixed.is_contiguous(memory_format=memory_format)
    assert torch.equal(images, before[0]) and torch.equal(labels, before[1])


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0)])
def test_nothing_is_read_from_the_device(batch, alphas):
    """Tensors on the meta device have no values to read."""
    images, targets = mixup_of(*alphas)(*(tensor.to("meta") for tensor in batch), 0, 0)
    assert (images.shape, images.device.type) == ((NUM_IMAGES, 3, HEIGHT, WIDTH), "meta")
    assert (targets.shape, targets.device.type) == ((NUM_IMAGES, NUM_CLASSES), "meta")


@pytest.mark.parametrize("alphas", [(0.4, 0.0), (0.0, 1.0)])
def test_a_batch_of_one_has_itself_for_a_neighbour(batch, alphas):
    images, labels = batch[0][:1], batch[1][:1]
    mixed, targets = mixup_of(*alphas)(images, labels, 0, 0)
    torch.testing.assert_close(mixed, images)
    torch.testing.assert_close(targets, torch.eye(NUM_CLASSES)[labels])


def test_a_box_may_be_empty_or_all(batch):
    """Alphas this small draw lambda 0 or 1."""
    shares = set()
    for step in range(60):
        mixed, targets = mixup_of(cutmix_alpha=1e-3)(*batch, step, 0)
        assert targets.sum(1).tolist() == pytest.approx([1.0] * NUM_IMAGES)
        shares.add(round((mixed == batch[0]).double().mean().item(), 6))
    assert {0.75, 1.0} & shares and 1.0 in shares and min(shares) < 1.0
