"""What becomes of one picture when it is packed."""

import io
from contextlib import suppress

import cv2
import numpy as np
from PIL import Image

from image_classification.data.decode import Picture
from image_classification.data.records.manifest import StoreOptions

_EXIF_ORIENTATION = 0x0112


def stored_bytes(data: bytes, options: StoreOptions) -> bytes:
    """The bytes to store for a picture's file.

    A picture within the limits of the options, or without limits, keeps its bytes. A larger one becomes a reduced
    JPEG of what training would decode, with the same EXIF orientation, so that it can still be applied or not.

    Raises:
        DecodeError: the picture cannot be decoded, also where its bytes would be kept.
    """
    picture = Picture(data)
    pixels = picture.pixels()
    scale = _scale(picture.width, picture.height, options)
    if scale >= 1:
        return data
    size = tuple(max(1, round(side * scale)) for side in (picture.width, picture.height))
    reduced = cv2.resize(np.ascontiguousarray(pixels), size, interpolation=cv2.INTER_AREA)
    exif = Image.Exif()
    exif[_EXIF_ORIENTATION] = _orientation(data)
    encoded = io.BytesIO()
    Image.fromarray(reduced).save(encoded, "JPEG", quality=options.quality, exif=exif)
    return encoded.getvalue()


def _scale(width: int, height: int, options: StoreOptions) -> float:
    if options.resize_short is not None:
        return options.resize_short / min(width, height)
    if options.max_side is not None:
        return options.max_side / max(width, height)
    return 1.0


def _orientation(data: bytes) -> int:
    """The EXIF orientation of a decoded picture; 1, upright, where there is none or it cannot be read."""
    # Pillow raises whatever broken tags lead it into; the picture itself is whole.
    with suppress(Exception), Image.open(io.BytesIO(data)) as image:
        if image.format == "TIFF":
            # Pillow turns these when it decodes them, and then says that they are upright.
            image.load()
        return image.getexif().get(_EXIF_ORIENTATION, 1)
    return 1
