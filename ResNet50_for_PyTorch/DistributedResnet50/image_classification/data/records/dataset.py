"""A records folder as a data set: the same pictures in the same order as the folder that was packed."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from image_classification.data.decode import DecodeError
from image_classification.data.pictures import PictureDataset
from image_classification.data.records.index import INDEX_ROW, read_image
from image_classification.data.records.manifest import SplitEntry, index_file
from mmcls.utils.errors import RequestError

OPEN_SHARDS = 512
"""A process keeps at most this many files open: the usual limit is 1,024."""


class RecordDataset(PictureDataset):
    """The pictures of one split, read from its shards.

    The index is mapped into memory, so all processes of a machine share it.

    Args:
        folder: the records folder.
        entry: the split's entry in the manifest; the other arguments are those of PictureDataset.

    Raises:
        RequestError: the index does not fit the manifest.
    """

    def __init__(self, folder: Path, split: str, class_names: tuple[str, ...], entry: SplitEntry, **options):
        labels = np.repeat(np.arange(len(class_names), dtype=np.int32), entry.class_counts)
        super().__init__(split, class_names, labels, **options)
        self._index_path = folder / index_file(split)
        self._paths = [folder / shard.file for shard in entry.shards]
        self._starts = np.cumsum([0, *(shard.images for shard in entry.shards)])
        self._open()
        if self._index.shape != labels.shape or self._index.dtype != INDEX_ROW:
            raise RequestError(f"{self._index_path}", "does not fit the manifest", "copy it again or pack again")

    def name(self, index: int) -> str:
        # Only here, because it needs pyarrow, which takes 45 MB in each process.
        from image_classification.data.records.shards import read_name

        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = index - int(self._starts[number])
        try:
            name = read_name(self._paths[number], row)
        except DecodeError:
            name = "its name cannot be read"
        return f"{self._paths[number]}, record {row} ({name})"

    def encoded(self, index: int) -> bytes:
        row = self._index[index]
        try:
            file = self._open_shard(int(row["shard"]))
        except (OSError, IndexError) as error:
            raise DecodeError(getattr(error, "strerror", None) or "damaged index") from error
        return read_image(file, row)

    def _open(self) -> None:
        try:
            # As a plain array: a memmap takes ten times as long to give a row.
            self._index = np.asarray(np.load(self._index_path, mmap_mode="r"))
        except (OSError, ValueError, EOFError) as error:
            raise RequestError(
                f"{self._index_path}", f"cannot be read: {error}", "copy it again or pack again"
            ) from error
        self._open_shard = lru_cache(OPEN_SHARDS)(lambda number: self._paths[number].open("rb", buffering=0))

    def __getstate__(self) -> dict:
        # Open files cannot be sent to another process, and the index need not be.
        return {name: value for name, value in self.__dict__.items() if name not in ("_index", "_open_shard")}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._open()
