"""Where each picture lies: with it, reading one is a single `pread` of its bytes.

The index of a split is a NumPy array with a row a picture, so all processes of a machine can map the same one.
"""

import hashlib
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import numpy as np

from image_classification.data.decode import DecodeError

INDEX_ROW = np.dtype([("start", np.int64), ("length", np.int32), ("crc32", np.uint32), ("shard", np.int32)])
"""Where the bytes of a picture start in their shard, how many there are, their checksum, and the shard's number."""
_HASHED_BYTES = 2**20


def read_image(file: BinaryIO, row: np.void) -> bytes:
    """The bytes of a picture's file, compared with their checksum.

    Args:
        file: its shard.
        row: of the index.

    Raises:
        DecodeError: they cannot be read or are damaged.
    """
    start, length, crc32, _ = row.item()
    try:
        image = os.pread(file.fileno(), length, start)
    except (OSError, OverflowError) as error:
        raise DecodeError(failure_reason(error)) from error
    if zlib.crc32(image) != crc32:
        raise DecodeError("damaged: wrong checksum")
    return image


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()


def failure_reason(error: Exception) -> str:
    """Says in a few words why a shard or a record could not be read."""
    # pyarrow raises OSError both for what the system says, with its number, and for what the file holds.
    return os.strerror(error.errno) if getattr(error, "errno", None) else f"damaged: {' '.join(str(error).split())}"
