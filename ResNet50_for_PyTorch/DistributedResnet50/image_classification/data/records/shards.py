"""The files of a records folder: Arrow IPC files with a picture a record batch, so any of them is read by its number.

Columns: `image`, the bytes of the picture's file; `crc32` of these; `label`; `name`, the path of the file below train/
or val/, in the bytes of the file system.
"""

import hashlib
import os
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pyarrow

from image_classification.data.decode import DecodeError

ENDING = ".arrow"
_SCHEMA = pyarrow.schema(
    [("image", pyarrow.binary()), ("crc32", pyarrow.uint32()), ("label", pyarrow.int32()), ("name", pyarrow.binary())]
)
_IMAGE, _CRC32, _LABEL, _NAME = range(4)
# A picture is one small read: threads would cost more than they bring.
_READ_OPTIONS = pyarrow.ipc.IpcReadOptions(use_threads=False)
_HASHED_BYTES = 2**20


class Record(NamedTuple):
    """A picture of a shard: the bytes of its file, its label, and its path below train/ or val/."""

    image: bytes
    label: int
    name: str


def write_shard(path: Path, records: Iterable[Record]) -> int:
    """Writes a shard and waits until it is on the disk; returns the number of records.

    Raises:
        OSError: it cannot be written; what has been written has no index and is no shard.
    """
    count = 0
    with path.open("wb") as file:
        with pyarrow.ipc.new_file(file, _SCHEMA) as writer:
            for image, label, name in records:
                row = ([image], [zlib.crc32(image)], [label], [os.fsencode(name)])
                writer.write_batch(pyarrow.record_batch(list(map(pyarrow.array, row, _SCHEMA.types)), schema=_SCHEMA))
                count += 1
        file.flush()
        os.fsync(file.fileno())
    return count


class Shard:
    """A shard, open for reading.

    Raises:
        DecodeError: it is missing or damaged; so do the methods for a record that is.
    """

    def __init__(self, path: Path):
        try:
            # The bytes of the name: pyarrow takes strings in UTF-8 only.
            self._file = pyarrow.ipc.open_file(pyarrow.OSFile(os.fsencode(path)), options=_READ_OPTIONS)
        except (OSError, ValueError, MemoryError) as error:
            raise DecodeError(_damaged(error)) from error

    def __len__(self) -> int:
        return self._file.num_record_batches

    def image(self, row: int) -> bytes:
        """The bytes of a picture's file, compared with their checksum."""
        batch = self._batch(row)
        image = batch.column(_IMAGE)[0].as_py()
        if zlib.crc32(image) != batch.column(_CRC32)[0].as_py():
            raise DecodeError("damaged: wrong checksum")
        return image

    def label(self, row: int) -> int:
        """A picture's label."""
        return self._batch(row).column(_LABEL)[0].as_py()

    def name(self, row: int) -> str:
        """The path that a picture had below train/ or val/."""
        return os.fsdecode(self._batch(row).column(_NAME)[0].as_py())

    def _batch(self, row: int) -> pyarrow.RecordBatch:
        try:
            batch = self._file.get_batch(row)
            # Without it, damaged lengths would be followed to memory of others.
            batch.validate()
        except (OSError, ValueError, MemoryError) as error:
            raise DecodeError(_damaged(error)) from error
        if batch.num_rows != 1 or batch.schema != _SCHEMA:
            raise DecodeError("damaged: not the record of a picture")
        return batch


def file_sha256(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_HASHED_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _damaged(error: Exception) -> str:
    # pyarrow raises OSError both for what the system says, with its number, and for what the file holds.
    return os.strerror(error.errno) if getattr(error, "errno", None) else f"damaged: {' '.join(str(error).split())}"
