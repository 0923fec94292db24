"""Reading one picture file, whatever its format and mode, as RGB."""

from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

ENDINGS = frozenset({".jpg", ".jpeg", ".png", ".bmp", ".webp", ".gif", ".tif", ".tiff", ".ppm"})
"""Names that count as pictures, in lower case; the content decides about the format."""


class ImageReadError(RuntimeError):
    """A picture cannot be decoded.

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


def read_rgb(path: Path) -> Image.Image:
    """Decodes a file to mode RGB: first frame, alpha dropped, EXIF rotation not applied (as torchvision).

    Raises:
        OSError, ValueError, SyntaxError, EOFError: as Pillow raises for files it cannot decode; see `failure_reason`.
    """
    with Image.open(path) as image:
        image.load()
        # Pillow blends nothing when it drops alpha, but warns about palettes with several transparent colours.
        image.info.pop("transparency", None)
        if image.mode == "I" or image.mode.startswith("I;16"):
            # Pillow would clip 16-bit grey at 255 and leave a white picture.
            grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535) // 257
            return Image.fromarray(grey.astype(np.uint8)).convert("RGB")
        return image.convert("RGB")


def read_size(path: Path) -> tuple[int, int]:
    """Width and height in pixels, from the file's header alone; raises like `read_rgb`."""
    with Image.open(path) as image:
        return image.size


DECODE_ERRORS = (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError)
"""What Pillow raises for broken files of any format."""


def failure_reason(path: Path, error: Exception) -> str:
    """Says in a few words why a file could not be decoded."""
    if isinstance(error, FileNotFoundError):
        return "broken link" if path.is_symlink() else "no such file"
    if isinstance(error, UnidentifiedImageError):
        return "not an image" if path.stat().st_size else "empty file"
    if "truncated" in str(error).lower():
        return "truncated"
    return getattr(error, "strerror", None) or " ".join(str(error).split())
