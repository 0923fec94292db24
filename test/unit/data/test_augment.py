"""Views of single pictures against plain loops, and against torchvision."""

import io

import numpy as np
import pytest
import torch
import torchvision.transforms.v2 as transforms
from PIL import Image

from image_classification.data import augment
from image_classification.data.decode import Picture


def picture(width: int, height: int) -> Image.Image:
    """Smooth, as photos are."""
    small = np.random.default_rng(width * height).integers(0, 256, size=(5, 6, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, image_format="PNG", **options) -> Picture:
    buffer = io.BytesIO()
    image.save(buffer, image_format, **options)
    return Picture(buffer.getvalue())


@pytest.mark.parametrize("width, height", [(500, 375), (333, 500), (256, 256), (60, 41), (30, 400)])
def test_validation_view_is_torchvisions(width, height):
    image = picture(width, height)
    expected = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])(image)
    difference = np.abs(augment.big_view(encoded(image), 224).astype(int) - np.asarray(expected))
    assert difference.mean() < 0.5 and difference.max() <= 3


@pytest.mark.parametrize("width, height", [(500, 375), (2400, 2000)])
def test_validation_view_of_a_jpeg_is_pillows_and_torchvisions(width, height):
    jpeg = encoded(Image.fromarray(noisy(width, height)), "JPEG", quality=90)
    expected = transforms.Compose([transforms.Resize(256), transforms.CenterCrop(224)])(Image.fromarray(jpeg.pixels()))
    difference = np.abs(augment.big_view(jpeg, 224).astype(int) - np.asarray(expected))
    assert difference.mean() < 0.5 and difference.max() <= 3


def noisy(width: int, height: int) -> np.ndarray:
    """A smooth picture with noise of 10 grey levels."""
    noise = np.random.default_rng(0).normal(0, 10, (height, width, 3))
    return (np.asarray(picture(width, height)) + noise).clip(0, 255).astype(np.uint8)


@pytest.mark.parametrize("width, height", [(100, 80), (224, 224), (300, 300), (300, 200), (500, 480), (1400, 1300)])
def test_fast_resize_is_close_to_pillows(width, height):
    image = picture(width, height)
    box = (3, 5, width - 6, height - 2)
    views = [np.asarray(image.resize((224, 224), Image.Resampling.BILINEAR, box=box)).astype(int)]
    # Chroma is as fine as light here: what repeating coarser chroma costs is test_decode's to say.
    for encoding in (encoded(image), encoded(image, "JPEG", quality=95, subsampling=0)):
        views.append(augment.resample_fast(encoding, box, 224))
        assert views[-1].dtype == np.uint8 and views[-1].shape == (224, 224, 3)
        assert np.abs(views[-1] - views[0]).mean() < 2


def test_small_view_keeps_a_square_picture():
    image = picture(32, 32)
    assert np.array_equal(augment.small_view(encoded(image), 32), np.asarray(image))


@pytest.mark.parametrize("width, height", [(1, 1), (3000, 20), (20, 3000), (1, 60_000)])
@pytest.mark.parametrize("image_format", ["PNG", "JPEG"])
def test_extreme_shapes(width, height, image_format):
    image = encoded(Image.new("RGB", (width, height), (9, 9, 9)), image_format)
    for view in (augment.big_view, augment.small_view):
        assert np.array_equal(np.unique(view(image, 32).reshape(-1, 3), axis=0), [[9, 9, 9]])
    for seed in range(5):
        view = augment.big_training_view(image, 32, np.random.default_rng(seed))
        assert view.shape == (32, 32, 3) and np.array_equal(np.unique(view), [9])
    assert augment.small_training_view(image, 32, np.random.default_rng(0)).shape == (32, 32, 3)


def test_big_training_view_is_the_crop_that_was_drawn_mirrored_half_of_the_time():
    image = picture(300, 260)
    source, mirrored = encoded(image), 0
    for seed in range(200):
        view = augment.big_training_view(source, 64, np.random.default_rng(seed))
        box = augment.random_resized_crop_box(300, 260, np.random.default_rng(seed))
        expected = np.asarray(image.resize((64, 64), Image.Resampling.BILINEAR, box=box)).astype(int)
        as_drawn, flipped = (np.abs(v - expected).mean() for v in (view, view[:, ::-1]))
        assert min(as_drawn, flipped) < 2
        mirrored += flipped < as_drawn
    assert 75 <= mirrored <= 125


@pytest.mark.parametrize("width, height", [(500, 375), (375, 500), (100, 30)])
def test_random_crops_follow_torchvisions_law(width, height):
    """Quantiles of area and aspect ratio, against torchvision's own draws."""
    rng = np.random.default_rng(0)
    boxes = np.array([augment.random_resized_crop_box(width, height, rng) for _ in range(10_000)])
    lefts, tops, rights, bottoms = boxes.T
    assert boxes.min() >= 0 and rights.max() <= width and bottoms.max() <= height

    image = torch.zeros(3, height, width)
    crop = transforms.RandomResizedCrop(8)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        theirs = [crop.make_params([image]) for _ in range(10_000)]
    peer_widths, peer_heights = (np.array([params[side] for params in theirs]) for side in ("width", "height"))

    quantiles = np.linspace(0.05, 0.95, 10)
    widths, heights = rights - lefts, bottoms - tops
    np.testing.assert_allclose(
        np.quantile(widths * heights, quantiles), np.quantile(peer_widths * peer_heights, quantiles), rtol=0.07
    )
    np.testing.assert_allclose(
        np.quantile(widths / heights, quantiles), np.quantile(peer_widths / peer_heights, quantiles), rtol=0.04
    )


def test_small_training_view_shifts_and_mirrors():
    image = encoded(picture(16, 16))
    padded = np.pad(image.pixels(), ((2, 2), (2, 2), (0, 0)))
    possible = {
        padded[top : top + 16, left : left + 16][:, ::step].tobytes()
        for top in range(5)
        for left in range(5)
        for step in (1, -1)
    }
    seen = {augment.small_training_view(image, 16, np.random.default_rng(seed)).tobytes() for seed in range(600)}
    assert seen == possible
