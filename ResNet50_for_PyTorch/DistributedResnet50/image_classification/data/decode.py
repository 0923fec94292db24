"""Decoding one picture, whatever its format and mode, to RGB.

JPEG goes through libjpeg-turbo, to the same bits as Pillow unless it is asked to be fast; everything else through Pillow.
"""

import io
import os
import warnings
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import simplejpeg
from PIL import Image, ImageOps, UnidentifiedImageError

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
"""Names that count as pictures, in lower case; the content decides about the format."""

Box = tuple[float, float, float, float]
"""Left, upper, right, lower in pixels."""

_JPEG_START = b"\xff\xd8\xff"
_REDUCTIONS = (8, 4, 2)
"""Fractions of the size at which libjpeg-turbo decodes for less work."""
_LOST_PIXELS = ("premature end", "bad huffman code", "instead of rst")
"""Warnings of libjpeg after which part of the picture is grey or noise."""
EXIF_ORIENTATION = 0x0112


class DecodeError(ValueError):
    """Encoded bytes, or the file that should hold them, are no whole picture; the text says why in a few words."""


class ImageReadError(RuntimeError):
    """A picture of a data set cannot be decoded.

    Args:
        path: the file.
        class_name: the class whose folder holds it.
        split: train or val.
        reason: what is wrong with it, in a few words.
    """

    def __init__(self, path: str, class_name: str, split: str, reason: str):
        # All of them in args: the error is pickled on its way out of a loader process.
        super().__init__(path, class_name, split, reason)
        self.path, self.class_name, self.split, self.reason = path, class_name, split, reason

    def __str__(self) -> str:
        return f"cannot read image {self.path} (class {self.class_name}, {self.split}): {self.reason}"


class Picture:
    """An encoded picture, decoded when its pixels are asked for. First frame; alpha is dropped.

    Args:
        data: the bytes of the file, in any format that Pillow reads.
        exif_rotation: turn it as its EXIF orientation says; torchvision's folders do not.

    Attributes:
        width, height: in pixels, after the rotation.

    Raises:
        DecodeError: it is no picture.
    """

    def __init__(self, data: bytes, exif_rotation: bool = False):
        self._data, self._orientation, self._pixels = data, 1, None
        self._stored_shape = _jpeg_shape(data)
        if self._stored_shape is None:
            self._pixels = _decode_by_pillow(data, exif_rotation)
            self.height, self.width = self._pixels.shape[:2]
            return
        if exif_rotation:
            self._orientation = exif_orientation(data)
        self.height, self.width = self._stored_shape if self._orientation < 5 else self._stored_shape[::-1]

    def pixels(self, reduction: int = 1, fast: bool = False) -> np.ndarray:
        """Decodes it.

        Args:
            reduction: 1, 2, 4 or 8: the sides of a JPEG are divided by it, rounded up. Other formats stay whole.
            fast: repeat the coarser chroma of a JPEG instead of interpolating it: a tenth less time, over photos 0.7
                grey levels off in mean. Without it the pixels are Pillow's.

        Returns:
            `[height, width, 3]`, uint8, RGB; perhaps read-only or a view in another order of memory.

        Raises:
            DecodeError: it is damaged.
        """
        if self._pixels is not None:
            return self._pixels
        return _upright(_decode_jpeg(self._data, *self._stored_shape, reduction, fast), self._orientation)

    def region(self, box: Box, size: int) -> tuple[np.ndarray, Box]:
        """Pixels to cut a box from that will be resized to `size` x `size`, and the box in them.

        They are decoded fast, and at half, a quarter or an eighth of the size as long as the box keeps `size` pixels a
        side.
        """
        side = min(box[2] - box[0], box[3] - box[1])
        reduction = next((factor for factor in _REDUCTIONS if side >= factor * size), 1)
        pixels = self.pixels(reduction, fast=True)
        per_row, per_column = pixels.shape[0] / self.height, pixels.shape[1] / self.width
        return pixels, (box[0] * per_column, box[1] * per_row, box[2] * per_column, box[3] * per_row)


def read_file(path: str | Path) -> bytes:
    """The bytes of a picture's file.

    Raises:
        DecodeError: it cannot be read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            return file.read()
    except FileNotFoundError as error:
        raise DecodeError("broken link" if os.path.islink(path) else "no such file") from error
    except OSError as error:
        raise DecodeError(error.strerror or str(error)) from error


def prepare_worker() -> None:
    """Settings of a process that does nothing but decode: no threads of OpenCV's own, no warnings about odd files."""
    cv2.setNumThreads(0)
    warnings.filterwarnings("ignore", module=r"PIL\.")


def _jpeg_shape(data: bytes) -> tuple[int, int] | None:
    """Height and width of a JPEG that libjpeg-turbo turns into the same RGB as Pillow."""
    if not data.startswith(_JPEG_START):
        return None
    try:
        height, width, colorspace, _ = simplejpeg.decode_jpeg_header(data)
    except ValueError:
        return None
    if colorspace not in ("YCbCr", "RGB", "Gray"):
        return None
    # Pillow refuses such sizes for every format; nothing has been allocated yet.
    if width * height > 2 * Image.MAX_IMAGE_PIXELS:
        raise DecodeError(f"{width} x {height} pixels, the limit is {2 * Image.MAX_IMAGE_PIXELS:,} in all")
    return height, width


def _decode_jpeg(data: bytes, height: int, width: int, reduction: int, fast: bool) -> np.ndarray:
    try:
        return simplejpeg.decode_jpeg(
            data, fastupsample=fast, min_height=-(-height // reduction), min_width=-(-width // reduction)
        )
    except ValueError as error:
        if any(words in str(error).lower() for words in _LOST_PIXELS):
            raise DecodeError(_reason(error)) from error
    # Nothing is lost, or it is a kind of JPEG that only Pillow takes: Pillow decides.
    return _decode_by_pillow(data, exif_rotation=False)


def _decode_by_pillow(data: bytes, exif_rotation: bool) -> np.ndarray:
    if not data:
        raise DecodeError("empty file")
    try:
        with Image.open(io.BytesIO(data)) as image:
            image.load()
            # Pillow blends nothing when it drops alpha, but warns about palettes with several transparent colours.
            image.info.pop("transparency", None)
            if exif_rotation:
                image = ImageOps.exif_transpose(image)
            if image.mode == "I" or image.mode.startswith("I;16"):
                # Pillow would clip 16-bit grey at 255 and leave a white picture.
                grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535) // 257
                image = Image.fromarray(grey.astype(np.uint8))
            return np.asarray(image.convert("RGB"))
    except Exception as error:  # Pillow's readers raise whatever a broken file leads them into
        raise DecodeError(_reason(error)) from error


def _reason(error: Exception) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, UnidentifiedImageError):
        return "not an image"
    if "truncated" in text.lower() or "premature end" in text.lower():
        return "truncated"
    return getattr(error, "strerror", None) or text or type(error).__name__


def exif_orientation(data: bytes) -> int:
    """The EXIF orientation of a picture, 1 to 8; 1, upright, where there is none or it cannot be read."""
    with suppress(Exception), Image.open(io.BytesIO(data)) as image:  # as in _decode_by_pillow; it may be whole
        if image.format == "TIFF":
            # Pillow turns these when it decodes them, and then says that they are upright.
            image.load()
        orientation = image.getexif().get(EXIF_ORIENTATION)
        if orientation in range(1, 9):
            return int(orientation)
    return 1


def _upright(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Turns and mirrors as EXIF 2.3, section 4.6.4 A, defines the orientations."""
    if orientation >= 5:
        pixels = pixels.swapaxes(0, 1)
    mirrored_rows, mirrored_columns = orientation in (3, 4, 7, 8), orientation in (2, 3, 6, 7)
    return pixels[:: -1 if mirrored_rows else 1, :: -1 if mirrored_columns else 1]
