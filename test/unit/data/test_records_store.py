"""What becomes of one picture when it is packed: its own bytes, or a reduced JPEG that shows the same."""

import io
import struct

import numpy as np
import pytest
from PIL import Image

from image_classification.data.decode import Picture
from image_classification.data.records.manifest import StoreOptions
from image_classification.data.records.store import stored_bytes

REDUCED = [
    (StoreOptions(resize_short=40), (80, 60), (53, 40)),
    (StoreOptions(resize_short=40), (60, 80), (40, 53)),
    (StoreOptions(max_side=40), (80, 60), (40, 30)),
    (StoreOptions(max_side=40), (4000, 2), (40, 1)),
]


def jpeg(size, seed=0, mode="RGB", image_format="JPEG", **options):
    rng = np.random.default_rng(seed)
    smooth = Image.fromarray(rng.integers(0, 256, size=(4, 4, 3), dtype=np.uint8)).resize(size, Image.BICUBIC)
    file = io.BytesIO()
    smooth.convert(mode).save(file, image_format, **options)
    return file.getvalue()


@pytest.mark.parametrize("options, size, expected", REDUCED)
def test_larger_pictures_are_reduced(options, size, expected):
    data = jpeg(size, quality=95)
    stored = stored_bytes(data, options)
    with Image.open(io.BytesIO(stored)) as image:
        assert (image.format, image.mode, image.size) == ("JPEG", "RGB", expected)
        reduced = np.asarray(image, dtype=float)
    with Image.open(io.BytesIO(data)) as image:
        reference = np.asarray(image.resize(expected, Image.BOX), dtype=float)
    assert np.abs(reduced - reference).mean() < 4


def test_quality_is_that_of_the_option():
    sizes = [len(stored_bytes(jpeg((300, 200)), StoreOptions(resize_short=100, quality=q))) for q in (10, 50, 90, 100)]
    assert sizes == sorted(sizes) and len(set(sizes)) == 4


@pytest.mark.parametrize("options", [StoreOptions(), StoreOptions(resize_short=60), StoreOptions(max_side=80)])
@pytest.mark.parametrize("mode, image_format", [("RGB", "JPEG"), ("CMYK", "JPEG"), ("L", "PNG"), ("P", "GIF")])
def test_pictures_within_the_limits_keep_their_bytes(options, mode, image_format):
    data = jpeg((80, 60), mode=mode, image_format=image_format)
    assert stored_bytes(data, options) == data


@pytest.mark.parametrize("mode, image_format", [("CMYK", "JPEG"), ("L", "JPEG"), ("RGBA", "PNG"), ("P", "GIF")])
def test_a_reduced_picture_shows_what_the_folder_shows(mode, image_format):
    data = jpeg((160, 120), mode=mode, image_format=image_format)
    reduced = Picture(stored_bytes(data, StoreOptions(resize_short=60, quality=100))).pixels()
    whole = Image.fromarray(Picture(data).pixels()).resize((80, 60), Image.BOX)
    assert np.abs(reduced.astype(float) - np.asarray(whole)).mean() < 4


def test_16_bit_grey_keeps_its_contrast():
    grey = np.linspace(0, 65535, 128 * 128).astype(np.uint16).reshape(128, 128)
    file = io.BytesIO()
    Image.fromarray(grey).save(file, "PNG")
    pixels = Picture(stored_bytes(file.getvalue(), StoreOptions(resize_short=64))).pixels()
    assert pixels.min() < 4 and pixels.max() > 251 and 120 < pixels.mean() < 135


@pytest.mark.parametrize(
    "kind, value",
    [(2, b"6"), (7, b"6"), (11, struct.pack("<f", 6.5)), (4, struct.pack("<I", 70_000)), (9, b"\xff" * 4)],
)
def test_an_exif_orientation_that_is_none_is_upright(kind, value):
    """Text, undefined bytes, a fraction, a number too large and one below zero, as EXIF numbers its types."""
    exif = b"Exif\0\0II*\0\x08\0\0\0" + struct.pack("<HHHI4sI", 1, 0x0112, kind, 1, value, 0)
    stored = stored_bytes(jpeg((80, 60), exif=exif), StoreOptions(resize_short=40))
    with Image.open(io.BytesIO(stored)) as image:
        assert image.size == (53, 40) and image.getexif().get(0x0112) == 1


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_exif_orientation_survives_the_reduction(image_format, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = jpeg((160, 80), image_format=image_format, exif=exif)
    stored = stored_bytes(data, StoreOptions(resize_short=40))
    for rotation in (False, True):
        reduced, whole = Picture(stored, rotation), Picture(data, rotation)
        assert (reduced.width * 2, reduced.height * 2) == (whole.width, whole.height)
        reference = Image.fromarray(np.ascontiguousarray(whole.pixels())).resize((reduced.width, reduced.height))
        assert np.abs(reduced.pixels().astype(float) - np.asarray(reference)).mean() < 6
