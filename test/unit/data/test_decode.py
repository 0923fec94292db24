"""Pictures of any format and mode against Pillow, and the reasons for those that cannot be decoded."""

import io
import random
import struct
import subprocess
import sys
import warnings
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps

from image_classification.data.decode import DecodeError, Picture, read_file

ORIENTATION = 0x0112
MODES = [
    ("RGB", "JPEG"),
    ("L", "JPEG"),
    ("CMYK", "JPEG"),
    ("RGB", "PNG"),
    ("RGBA", "PNG"),
    ("LA", "PNG"),
    ("P", "PNG"),
    ("1", "PNG"),
    ("P", "GIF"),
    ("RGB", "WEBP"),
    ("RGBA", "WEBP"),
    ("RGB", "TIFF"),
    ("CMYK", "TIFF"),
    ("RGB", "BMP"),
    ("RGB", "PPM"),
]


def image(width=40, height=48, mode="RGB") -> Image.Image:
    """Smooth, with some noise: an encoder has something to lose."""
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize((width, height), Image.Resampling.BICUBIC)) + rng.normal(0, 5, (height, width, 3))
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).convert(mode)


def encode(picture: Image.Image, image_format="JPEG", **options) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, image_format, **options)
    return buffer.getvalue()


def pillow_rgb(data: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


@pytest.mark.parametrize("mode, image_format", MODES)
def test_every_mode_gives_pillows_rgb(mode, image_format):
    data = encode(image(mode=mode), image_format)
    picture = Picture(data)
    assert (picture.width, picture.height) == (40, 48)
    assert picture.pixels().dtype == np.uint8 and np.array_equal(picture.pixels(), pillow_rgb(data))


@pytest.mark.parametrize("options", [{"progressive": True}, {"subsampling": 0}, {"subsampling": 2}, {"keep_rgb": True}])
@pytest.mark.parametrize("size", [(1, 1), (17, 9), (3000, 20)])
def test_every_kind_of_jpeg_equals_pillow(options, size):
    data = encode(image(*size), **options)
    for whole in (data, data + bytes(range(256)) * 20):
        assert np.array_equal(Picture(whole).pixels(), pillow_rgb(data))


def test_first_frame_of_an_animation():
    frames = [image(), ImageOps.invert(image())]
    data = encode(frames[0], "GIF", save_all=True, append_images=frames[1:])
    assert np.array_equal(Picture(data).pixels(), pillow_rgb(data))


def test_palette_with_several_transparent_colours_warns_nobody():
    plain, transparent = (encode(image(mode="P"), "PNG", **o) for o in ({}, {"transparency": bytes(range(256))}))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(Picture(transparent).pixels(), Picture(plain).pixels())


@pytest.mark.parametrize("image_format", ["PNG", "TIFF", "PPM"])
def test_16_bit_grey_keeps_its_contrast(image_format):
    grey = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    ours = Picture(encode(Image.fromarray(grey), image_format)).pixels()
    assert np.array_equal(ours, np.repeat((grey // 257).astype(np.uint8)[:, :, None], 3, axis=2))


def test_fast_decoding_changes_colours_and_hardly_the_light():
    data = encode(image(400, 300))
    fast, exact = (Picture(data).pixels(fast=fast).astype(int) for fast in (True, False))
    assert not np.array_equal(fast, exact) and np.array_equal(exact, pillow_rgb(data))
    assert np.abs(fast - exact).mean() < 2
    light = np.array([0.299, 0.587, 0.114])
    assert np.abs((fast - exact) @ light).mean() < 0.5


@pytest.mark.parametrize("reduction", [2, 4, 8])
@pytest.mark.parametrize("size", [(400, 300), (333, 217)])
def test_a_jpeg_is_decoded_at_a_fraction_of_its_size(reduction, size):
    picture = Picture(encode(image(*size)))
    small, whole = picture.pixels(reduction), Image.fromarray(picture.pixels())
    shape = -(-size[1] // reduction), -(-size[0] // reduction)
    assert small.shape == (*shape, 3) and (picture.width, picture.height) == size
    expected = np.asarray(whole.resize(shape[::-1], Image.Resampling.BOX)).astype(int)
    assert np.abs(small - expected).mean() < 6
    assert Picture(encode(image(*size), "PNG")).pixels(reduction).shape == (size[1], size[0], 3)


@pytest.mark.parametrize(
    "side, expected", [(100, 1), (199, 1), (200, 2), (399, 2), (400, 4), (799, 4), (800, 8), (900, 8)]
)
def test_the_fraction_leaves_the_box_at_least_its_target_size(side, expected):
    box = (10, 20, 10 + side, 20 + side + 50)
    pixels, scaled = Picture(encode(image(1000, 1200))).region(box, 100)
    assert pixels.shape == (1200 // expected, 1000 // expected, 3)
    assert scaled == tuple(edge / expected for edge in box)


@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotation_equals_pillows(image_format, orientation):
    exif = Image.Exif()
    exif[ORIENTATION] = orientation
    data = encode(image(), image_format, exif=exif)
    stored, turned = Picture(data), Picture(data, exif_rotation=True)
    expected = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB"))
    assert np.array_equal(stored.pixels(), pillow_rgb(data)) and (stored.width, stored.height) == (40, 48)
    assert np.array_equal(turned.pixels(), expected) and (turned.height, turned.width) == expected.shape[:2]


def test_exif_rotation_of_a_jpeg_decoded_at_a_fraction_of_its_size():
    exif = Image.Exif()
    exif[ORIENTATION] = 6
    turned = Picture(encode(image(401, 200), exif=exif), exif_rotation=True)
    pixels, box = turned.region((0, 0, 200, 401), 100)
    assert pixels.shape == (201, 100, 3) and box == (0, 0, 100, 201)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
@pytest.mark.parametrize("exif", [b"", b"Exif\0\0garbage", b"Exif\0\0II*\0\xff\xff\xff\xff"])
def test_a_picture_without_readable_exif_stays_as_it_is(exif):
    data = encode(image(), exif=exif)
    assert np.array_equal(Picture(data, exif_rotation=True).pixels(), pillow_rgb(data))


def png_of_size(width: int, height: int) -> bytes:
    """The header of a PNG, with next to no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(99))) + chunk(b"IEND", b"")
    )


def jpeg_of_size(width: int, height: int) -> bytes:
    """A small JPEG whose header claims another size."""
    data = bytearray(encode(image()))
    frame = data.index(b"\xff\xc0")
    data[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    return bytes(data)


WHOLE = encode(image(200, 160))
PROGRESSIVE = encode(image(200, 160), progressive=True)
BROKEN = {
    "empty": (b"", "empty file"),
    "text": (b"<html>404</html>", "not an image"),
    "half": (WHOLE[: len(WHOLE) // 2], "truncated"),
    # libjpeg fills the missing part with grey and says so; Pillow does not listen.
    "half, closed": (WHOLE[: len(WHOLE) // 2] + b"\xff\xd9", "truncated"),
    "half of its scans": (PROGRESSIVE[: len(PROGRESSIVE) // 2], "truncated"),
    "half of its scans, closed": (PROGRESSIVE[: len(PROGRESSIVE) // 2] + b"\xff\xd9", "truncated"),
    "last byte missing": (WHOLE[:-1], "truncated"),
    "header only": (WHOLE[:100], "truncated"),
    "start only": (WHOLE[:4], "not an image"),
    "half a PNG": ((whole := encode(image(), "PNG"))[: len(whole) // 2], "truncated"),
    "half a WebP": ((whole := encode(image(), "WEBP"))[: len(whole) // 2], ""),
    "half a GIF": ((whole := encode(image(), "GIF"))[: len(whole) // 2], "truncated"),
    "half a TIFF": ((whole := encode(image(), "TIFF"))[: len(whole) // 2], ""),
    "huge PNG": (png_of_size(60_000, 60_000), "exceeds limit"),
    "huge JPEG": (jpeg_of_size(60_000, 60_000), "60000 x 60000 pixels, the limit is"),
    "no pixels": (jpeg_of_size(0, 0), ""),
    "larger JPEG than its data": (jpeg_of_size(800, 600), "truncated"),
}


@pytest.mark.parametrize("exif_rotation", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_pictures_are_refused_with_the_reason(name, exif_rotation):
    data, reason = BROKEN[name]
    with pytest.raises(DecodeError) as caught:
        Picture(data, exif_rotation).pixels()
    text = str(caught.value)
    assert reason in text and text and "\n" not in text and "0x" not in text


@pytest.mark.filterwarnings("ignore:::PIL")
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP", "PPM"])
def test_damaged_bytes_give_a_picture_or_a_reason(image_format):
    """400 files with random damage: nothing but a DecodeError comes out."""
    whole, rng = encode(image(), image_format), random.Random(image_format)
    failed = 0
    for _ in range(400):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 8)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        try:
            pixels = Picture(bytes(data[: rng.randint(len(data) // 2, len(data))]), exif_rotation=True).pixels()
        except DecodeError as error:
            failed += 1
            assert str(error)
        else:
            assert pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
    assert failed > 10


def test_files_that_cannot_be_read(tmp_path):
    (tmp_path / "link.jpg").symlink_to(tmp_path / "gone.jpg")
    (tmp_path / "folder.jpg").mkdir()
    for name, reason in {"none.jpg": "no such file", "link.jpg": "broken link", "folder.jpg": "Is a directory"}.items():
        with pytest.raises(DecodeError, match=reason):
            read_file(tmp_path / name)
    (tmp_path / "whole.jpg").write_bytes(WHOLE)
    assert read_file(tmp_path / "whole.jpg") == WHOLE


def test_importing_leaves_opencvs_threads_alone_and_a_worker_has_one():
    code = (
        "import cv2\nbefore = cv2.getNumThreads()\nimport image_classification.data.decode as decode\n"
        "assert cv2.getNumThreads() == before\ndecode.prepare_worker()\nassert cv2.getNumThreads() == 1\n"
    )
    paths = [path for path in sys.path if path]
    subprocess.run([sys.executable, "-c", f"import sys\nsys.path[:0] = {paths}\n{code}"], check=True)
