"""Which picture goes into which shard: decided once and written down, so that an interrupted pack can go on."""

import hashlib
import json
import os
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from image_classification.data.decode import DecodeError, read_file
from image_classification.data.folder import FolderDataset
from image_classification.data.records.manifest import UNFINISHED, ShardEntry, StoreOptions, write_json
from image_classification.data.records.shards import ENDING
from image_classification.data.records.store import stored_bytes
from mmcls.utils.errors import RequestError

SPLITS = ("train", "val")
SAMPLES = 64
"""Pictures by which the size of all is estimated."""
LEAST_SHARDS, LEAST_SHARD_BYTES = 64, 4 * 2**20
"""A small data set is cut into up to so many shards of at least so many bytes, so that all processes have work."""


@dataclass(frozen=True)
class ShardTask:
    """A shard to be made.

    Args:
        split: train or val.
        number: its place among the shards of the split.
        file: its name in the records folder.
        start, stop: its pictures in the order of the split.
    """

    split: str
    number: int
    file: str
    start: int
    stop: int


@dataclass(frozen=True)
class Plan:
    """All that is to be packed.

    Args:
        source_sha256: of the names of all pictures and of the classes.
        options: what becomes of the pictures.
        stored_bytes: estimate for all pictures together.
        tasks: the shards, train first.
    """

    source_sha256: str
    options: StoreOptions
    stored_bytes: int
    tasks: tuple[ShardTask, ...]


@dataclass(frozen=True)
class FinishedShard:
    """A shard that is complete.

    Args:
        entry: what the manifest says about it.
        class_counts: pictures by label.
        bad: path and reason of each picture that was left out.
    """

    entry: ShardEntry
    class_counts: dict[int, int]
    bad: tuple[tuple[str, str], ...]


def source_sha256(splits: dict[str, FolderDataset]) -> str:
    """A digest of the classes and of the names and order of all pictures; not of their content."""
    digest = hashlib.sha256()
    for split, dataset in splits.items():
        for name in (split, *dataset.class_names, *(relative_name(dataset, i) for i in range(len(dataset)))):
            digest.update(os.fsencode(name) + b"\0")
    return digest.hexdigest()


def relative_name(dataset: FolderDataset, index: int) -> str:
    """The path of a picture below its split's folder."""
    return dataset.name(index).removeprefix(f"{dataset.root}/")


def make_plan(splits: dict[str, FolderDataset], options: StoreOptions, digest: str) -> Plan:
    """Cuts each split into shards of equal numbers of pictures, by the size of a sample of them.

    Raises:
        RequestError: no picture of the sample can be read.
    """
    total = sum(map(len, splits.values()))
    each = _mean_stored_bytes(splits, options)
    shard_bytes = min(options.shard_bytes, max(LEAST_SHARD_BYTES, total * each / LEAST_SHARDS))
    per_shard = max(1, int(shard_bytes / each))
    tasks = []
    for split, dataset in splits.items():
        num_shards = -(-len(dataset) // per_shard)
        bounds = np.linspace(0, len(dataset), num_shards + 1).astype(int).tolist()
        tasks += [
            ShardTask(split, number, f"{split}-{number:05d}{ENDING}", start, stop)
            for number, (start, stop) in enumerate(pairwise(bounds))
        ]
    return Plan(digest, options, int(total * each), tuple(tasks))


def open_plan(out: Path, splits: dict[str, FolderDataset], options: StoreOptions, digest: str) -> Plan:
    """The plan of an unfinished pack, or a new one, written down.

    Raises:
        RequestError: the unfinished pack is of other pictures or has other options.
    """
    path = out / UNFINISHED / "plan.json"
    if not path.exists():
        plan = make_plan(splits, options, digest)
        write_json(path, asdict(plan))
        return plan
    content = json.loads(path.read_text(encoding="ascii"))
    if content["options"] != asdict(options) or content["source_sha256"] != digest:
        what = "other options" if content["options"] != asdict(options) else "another list of pictures"
        raise RequestError(
            f"--out={out}",
            f"holds an unfinished pack of {what}",
            "give the same command as before, or remove the folder to start again",
        )
    tasks = tuple(ShardTask(**task) for task in content["tasks"])
    return Plan(digest, options, content["stored_bytes"], tasks)


def index_part(out: Path, file: str) -> Path:
    """Where the rows of the index that belong to a shard wait for the others."""
    return out / UNFINISHED / f"{file}.index.npy"


def write_finished(out: Path, finished: FinishedShard) -> None:
    """Notes that a shard is complete; the last thing that is done for it."""
    write_json(_note(out, finished.entry.file), asdict(finished))


def read_finished(out: Path, task: ShardTask) -> FinishedShard | None:
    """The shard of a task, if it is complete."""
    note, path = _note(out, task.file), out / task.file
    if not (note.exists() and path.exists() and index_part(out, task.file).exists()):
        return None
    content = json.loads(note.read_text(encoding="ascii"))
    entry = ShardEntry(**content["entry"])
    if path.stat().st_size != entry.bytes:
        return None
    counts = {int(label): count for label, count in content["class_counts"].items()}
    return FinishedShard(entry, counts, tuple(map(tuple, content["bad"])))


def _note(out: Path, file: str) -> Path:
    return out / UNFINISHED / f"{file}.json"


def _mean_stored_bytes(splits: dict[str, FolderDataset], options: StoreOptions) -> float:
    sizes, failed = [], "there are none"
    step = max(1, sum(map(len, splits.values())) // SAMPLES)
    for dataset in splits.values():
        for index in range(0, len(dataset), step):
            try:
                sizes.append(len(stored_bytes(read_file(dataset.path(index)), options)))
            except DecodeError as error:
                failed = f"{dataset.path(index)}: {error}"
    if not sizes:
        raise RequestError(
            f"--data_path={next(iter(splits.values())).root.parent}",
            f"none of the pictures tried can be read ({failed})",
            "replace them",
        )
    return float(np.mean(sizes))
