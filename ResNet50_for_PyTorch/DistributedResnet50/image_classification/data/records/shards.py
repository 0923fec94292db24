"""The files of a records folder: Arrow IPC files that hold the pictures.

Columns of a shard: `image`, the bytes of the picture's file; `crc32` of these; `label`; `name`, the path of the file
below train/ or val/, in the bytes of the file system.

Reading them in training is left to index: Arrow would have each process read all of a shard from the disk first.
"""

import mmap
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
import pyarrow

from image_classification.data.decode import DecodeError
from image_classification.data.records.index import INDEX_ROW, failure_reason

ENDING = ".arrow"
_SCHEMA = pyarrow.schema(
    [("image", pyarrow.binary()), ("crc32", pyarrow.uint32()), ("label", pyarrow.int32()), ("name", pyarrow.binary())]
)
_IMAGE, _CRC32, _LABEL, _NAME = range(4)
_ARROW_ERRORS = (OSError, ValueError, KeyError, MemoryError, pyarrow.ArrowException)
"""What pyarrow raises for damaged files."""
_BATCH_BYTES = 16 * 2**20
"""Pictures are gathered in memory until they are so large, then written as a record batch."""


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
    count, rows, size = 0, [], 0
    with path.open("wb") as file:
        with pyarrow.ipc.new_file(file, _SCHEMA) as writer:
            for image, label, name in records:
                rows.append((image, zlib.crc32(image), label, os.fsencode(name)))
                count, size = count + 1, size + len(image)
                if size >= _BATCH_BYTES:
                    writer.write_batch(_batch(rows))
                    rows, size = [], 0
            if rows:
                writer.write_batch(_batch(rows))
        file.flush()
        os.fsync(file.fileno())
    return count


def _batch(rows: list[tuple]) -> pyarrow.RecordBatch:
    return pyarrow.record_batch(list(map(pyarrow.array, zip(*rows), _SCHEMA.types)), schema=_SCHEMA)


def read_index(path: Path, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Finds the pictures of a shard.

    Args:
        number: the shard's, for the index.

    Returns:
        The rows of the index, `[N]` of INDEX_ROW, and the labels, `[N]`, int32.

    Raises:
        DecodeError: the shard is missing or damaged.
    """
    rows, labels = [np.empty(0, INDEX_ROW)], [np.empty(0, np.int32)]
    try:
        with path.open("rb") as opened:
            file = pyarrow.py_buffer(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))
        for batch in _batches(file):
            _, ends, images = batch.column(_IMAGE).buffers()
            ends = np.frombuffer(ends, np.int32, batch.num_rows + 1)
            found = np.empty(batch.num_rows, INDEX_ROW)
            found["start"] = images.address - file.address + ends[:-1].astype(np.int64)
            found["length"], found["crc32"], found["shard"] = np.diff(ends), batch.column(_CRC32), number
            rows.append(found)
            labels.append(np.array(batch.column(_LABEL)))
    except _ARROW_ERRORS as error:
        raise DecodeError(failure_reason(error)) from error
    return np.concatenate(rows), np.concatenate(labels)


def read_name(path: Path, row: int) -> str:
    """The path that a picture of a shard had below train/ or val/.

    Raises:
        DecodeError: the shard is damaged.
    """
    try:
        with path.open("rb") as file:
            for batch in _batches(file, pyarrow.ipc.IpcReadOptions(included_fields=[_NAME])):
                if row < batch.num_rows:
                    return os.fsdecode(batch.column("name")[row].as_py())
                row -= batch.num_rows
    except _ARROW_ERRORS as error:
        raise DecodeError(failure_reason(error)) from error
    raise DecodeError("damaged: too few records")


def _batches(
    file: pyarrow.Buffer | BinaryIO, options: pyarrow.ipc.IpcReadOptions | None = None
) -> Iterator[pyarrow.RecordBatch]:
    """The record batches of a file; everything that is followed to find the values is checked."""
    reader = pyarrow.ipc.open_file(file, options=options)
    if options is None and reader.schema != _SCHEMA:
        raise ValueError("not a shard of pictures")
    for number in range(reader.num_record_batches):
        batch = reader.get_batch(number)
        batch.validate(full=True)
        if any(column.null_count for column in batch.columns):
            raise ValueError("values are missing")
        yield batch
