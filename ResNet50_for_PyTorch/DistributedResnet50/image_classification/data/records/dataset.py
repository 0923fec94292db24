"""A records folder as a data set: the same pictures in the same order as the folder that was packed."""

from functools import lru_cache
from pathlib import Path

import numpy as np

from image_classification.data.decode import DecodeError
from image_classification.data.pictures import PictureDataset
from image_classification.data.records.manifest import SplitEntry
from image_classification.data.records.shards import Shard

OPEN_SHARDS = 512
"""A process keeps at most this many files open: the usual limit is 1,024."""


class RecordDataset(PictureDataset):
    """The pictures of one split, read from its shards.

    Args:
        folder: the records folder.
        entry: the split's entry in the manifest; the other arguments are those of PictureDataset.
    """

    def __init__(self, folder: Path, split: str, class_names: tuple[str, ...], entry: SplitEntry, **options):
        labels = np.repeat(np.arange(len(class_names), dtype=np.int32), entry.class_counts)
        super().__init__(split, class_names, labels, **options)
        self._paths = [folder / shard.file for shard in entry.shards]
        self._ends = np.cumsum([shard.images for shard in entry.shards])
        self._open_shard = None

    @property
    def num_shards(self) -> int:
        """Files that the split lies in; a process may have OPEN_SHARDS of them open at once."""
        return len(self._paths)

    def name(self, index: int) -> str:
        number, row = self._place(index)
        try:
            name = self._shard(number).name(row)
        except DecodeError:
            name = "its name is unreadable too"
        return f"{self._paths[number]}, record {row} ({name})"

    def encoded(self, index: int) -> bytes:
        number, row = self._place(index)
        return self._shard(number).image(row)

    def _place(self, index: int) -> tuple[int, int]:
        """The number of the picture's shard, and the row in it."""
        number = int(np.searchsorted(self._ends, index, side="right"))
        return number, int(index - (self._ends[number - 1] if number else 0))

    def _shard(self, number: int) -> Shard:
        if self._open_shard is None:
            self._open_shard = lru_cache(OPEN_SHARDS)(self._open)
        return self._open_shard(number)

    def _open(self, number: int) -> Shard:
        return Shard(self._paths[number])

    def __getstate__(self) -> dict:
        # Open files cannot be sent to another process; it opens its own.
        return {**self.__dict__, "_open_shard": None}
