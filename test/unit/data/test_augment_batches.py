"""Whole batches on the device: exactly the plain loops, and the random law of torchvision's per-image transforms."""

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as transforms
from torch.nn import functional

from image_classification.data.augment_batches import CropFlipTable, CutoutTable, InputTransform, crop_flip, cutout

CPU = torch.device("cpu")
DRAWS = 20_000
# Chi-square is below these with probability 0.999, by degrees of freedom.
CHI_SQUARE_BOUND = {24: 51.2, 49: 85.4, 63: 103.4}


def draw(num_images, seed=0, **options):
    return CropFlipTable.draw(np.random.default_rng(seed), num_images, device=CPU, **options)


def draw_cutout(num_images, side, image_size, seed=0):
    return CutoutTable.draw(np.random.default_rng(seed), num_images, side=side, image_size=image_size, device=CPU)


def chi_square(counts, expected) -> float:
    return float((((counts - expected) ** 2) / expected).sum())


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("pad, flip", [(2, True), (0, True), (3, False)])
def test_crop_flip_equals_the_plain_loop(memory_format, pad, flip):
    images = torch.randint(0, 256, (9, 3, 6, 7), dtype=torch.uint8).contiguous(memory_format=memory_format)
    table = draw(20, pad=pad, flip=flip)
    indices = torch.tensor([19, 3, 3, 0, 7, 8, 1, 12, 5])
    views = crop_flip(images, indices, table)
    assert views.is_contiguous(memory_format=torch.channels_last)
    padded = functional.pad(images, [pad] * 4)
    for place, index in enumerate(indices):
        top, left = table.tops[index], table.lefts[index]
        expected = padded[place, :, top : top + 6, left : left + 7]
        assert torch.equal(views[place], expected.flip(-1) if table.mirrored[index] else expected)


def test_crops_and_mirrors_are_uniform():
    table = draw(DRAWS, pad=2, flip=True)
    counts = torch.bincount(table.tops * 5 + table.lefts, minlength=25).double()
    assert len(counts) == 25 and chi_square(counts, DRAWS / 25) < CHI_SQUARE_BOUND[24]
    assert abs(table.mirrored.double().mean() - 0.5) < 0.015
    assert not draw(1000, pad=2, flip=False).mirrored.any()


def numbered_pixels() -> torch.Tensor:
    """One picture `[1, 3, 4, 4]` whose pixels all differ, so a view of it says which crop and mirror it is."""
    return (torch.arange(16).view(1, 1, 4, 4).repeat(1, 3, 1, 1) + 1).to(torch.uint8)


def views_by_torchvision(num_images: int) -> torch.Tensor:
    both = transforms.Compose([transforms.RandomCrop(4, padding=2), transforms.RandomHorizontalFlip()])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return torch.cat([both(numbered_pixels()) for _ in range(num_images)])


def test_views_have_the_law_of_torchvisions_transforms():
    """Two samples over the 50 possible views: a chi-square test of homogeneity, and the mean picture."""
    ours_many, theirs_many = DRAWS, 2500
    images = numbered_pixels().expand(ours_many, -1, -1, -1)
    ours = crop_flip(images, torch.arange(ours_many), draw(ours_many, pad=2, flip=True))
    theirs = views_by_torchvision(theirs_many)
    kinds, which = torch.cat([ours, theirs]).flatten(1).unique(dim=0, return_inverse=True)
    assert len(kinds) == 50
    ours_counts = torch.bincount(which[:ours_many], minlength=50).double()
    theirs_counts = torch.bincount(which[ours_many:], minlength=50).double()
    both = ours_counts + theirs_counts
    statistic = sum(
        chi_square(counts, both * (many / (ours_many + theirs_many)))
        for counts, many in ((ours_counts, ours_many), (theirs_counts, theirs_many))
    )
    assert statistic < CHI_SQUARE_BOUND[49]
    # Deviation of a pixel is below 6 grey levels, so that of the difference of means below 0.095.
    assert (ours.double().mean(0) - theirs.double().mean(0)).abs().max() < 0.4


def test_each_image_and_each_epoch_has_its_own_draw():
    first, second = draw(5000, seed=0, pad=4, flip=True), draw(5000, seed=1, pad=4, flip=True)
    for one, other in ((first.tops, second.tops), (first.tops, first.tops.roll(1)), (first.tops, first.lefts)):
        # One in nine is equal by chance.
        assert abs((one == other).double().mean() - 1 / 9) < 0.02


def test_a_batch_may_be_cut_anywhere():
    images = torch.randint(0, 256, (12, 3, 5, 5), dtype=torch.uint8)
    table, indices = draw(12, pad=1, flip=True), torch.randperm(12)
    whole = crop_flip(images[indices], indices, table)
    parts = [crop_flip(images[part], part, table) for part in indices.split(5)]
    assert torch.equal(whole, torch.cat(parts))


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("size", [8, 16, 5])
def test_input_is_normalised(memory_format, size):
    images = torch.full((2, 3, 8, 8), 51, dtype=torch.uint8)
    to_input = InputTransform((0.0, 0.2, 1.0), (0.2, 2 / 255, 0.4), size, CPU, memory_format)
    out = to_input(images)
    assert out.dtype == torch.float32 and out.shape == (2, 3, size, size)
    assert out.is_contiguous(memory_format=memory_format)
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.tensor([1.0, 0.0, -2.0]))
    assert images[0, 0, 0, 0] == 51, "the data set itself is not touched"


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_input_is_torchvisions(memory_format):
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)
    images = torch.randint(0, 256, (4, 3, 8, 8), dtype=torch.uint8)
    out = InputTransform(mean, std, 8, CPU, memory_format)(images)
    theirs = transforms.Compose([transforms.ToDtype(torch.float32, scale=True), transforms.Normalize(mean, std)])
    torch.testing.assert_close(out, theirs(images))


@pytest.mark.parametrize("side", [1, 2, 3, 8, 40])
def test_cutout_equals_the_plain_loop(side):
    table = draw_cutout(30, side, 8)
    indices = torch.randperm(30)[:20]
    images = torch.randn(20, 3, 8, 8)
    expected = images.clone()
    for image, index in zip(expected, indices):
        row, column = table.centers[:, index].tolist()
        top, left = max(0, row - side // 2), max(0, column - side // 2)
        image[:, top : max(0, row - side // 2 + side), left : max(0, column - side // 2 + side)] = 0
    assert torch.equal(cutout(images, indices, table), expected)


def test_cutout_is_centred_anywhere():
    table = draw_cutout(DRAWS, 3, 8)
    counts = torch.bincount(table.centers[0] * 8 + table.centers[1], minlength=64).double()
    assert len(counts) == 64 and chi_square(counts, DRAWS / 64) < CHI_SQUARE_BOUND[63]
