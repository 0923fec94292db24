"""What becomes of one picture when it is packed."""

import io

import cv2
import numpy as np
from PIL import Image

from image_classification.data.decode import EXIF_ORIENTATION, Picture, exif_orientation
from image_classification.data.records.manifest import StoreOptions


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
    exif[EXIF_ORIENTATION] = exif_orientation(data)
    encoded = io.BytesIO()
    Image.fromarray(reduced).save(encoded, "JPEG", quality=options.quality, exif=exif)
    return encoded.getvalue()


def _scale(width: int, height: int, options: StoreOptions) -> float:
    if options.resize_short is not None:
        return options.resize_short / min(width, height)
    if options.max_side is not None:
        return options.max_side / max(width, height)
    return 1.0
