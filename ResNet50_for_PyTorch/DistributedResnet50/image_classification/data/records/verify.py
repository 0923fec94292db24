"""Reads a records folder back: every shard's checksum, and every picture."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from image_classification.data.decode import DecodeError, Picture
from image_classification.data.folder import shorten
from image_classification.data.layouts import absolute_path
from image_classification.data.processes import Advance, run_tasks
from image_classification.data.records.index import file_sha256, read_image
from image_classification.data.records.manifest import Manifest, ShardEntry, SplitEntry, index_file, read_manifest
from image_classification.data.records.shards import read_index
from mmcls.utils.errors import RequestError

PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class ShardCheck:
    """A shard to read, and what it should be.

    Args:
        number: its place among the shards of the split.
        entry: what the manifest says about it.
        index: `[N]` its rows of the index.
        labels: `[N]` of its pictures.
    """

    path: Path
    number: int
    entry: ShardEntry
    index: np.ndarray
    labels: np.ndarray


def verify(data_path: str, *, workers: int, report: Callable[[str], object]) -> Manifest:
    """Reads all of a records folder.

    Args:
        workers: processes.
        report: told what is wrong, a line each.

    Raises:
        RequestError: something is wrong.
    """
    folder = absolute_path(data_path)
    manifest = read_manifest(folder)
    num_shards = len(manifest.train.shards) + len(manifest.val.shards)
    damaged = []
    results = run_tasks(
        check_shard,
        _checks(folder, manifest),
        workers=workers,
        title="reading",
        total=manifest.train.images + manifest.val.images,
    )
    with closing(results):
        for file, problems in results:
            if problems:
                damaged.append(file)
                for problem in problems[:PROBLEMS_SHOWN]:
                    report(problem)
                if len(problems) > PROBLEMS_SHOWN:
                    report(f"{folder / file}: ... ({len(problems):,} in all)")
    if damaged:
        raise RequestError(
            f"--data_path={folder}",
            f"{len(damaged)} of {num_shards} shards are damaged: {shorten(sorted(damaged))}",
            "copy them again or pack again",
        )
    return manifest


def check_shard(check: ShardCheck, advance: Advance) -> tuple[str, list[str]]:
    """Reads a shard; returns its file's name and what is wrong with it, a line each."""
    problems = []
    try:
        if file_sha256(check.path) != check.entry.sha256:
            problems.append(f"{check.path}: its SHA-256 is not that of the manifest")
        index, labels = read_index(check.path, check.number)
        if not (np.array_equal(index, check.index) and np.array_equal(labels, check.labels)):
            problems.append(f"{check.path}: index or labels do not fit")
        with check.path.open("rb") as file:
            for row, place in enumerate(index):
                try:
                    Picture(read_image(file, place)).pixels()
                except DecodeError as error:
                    problems.append(f"{check.path}, record {row}: {error}")
                advance()
    except (OSError, DecodeError) as error:
        problems.append(f"{check.path}: {error}")
    return check.entry.file, problems


def _checks(folder: Path, manifest: Manifest) -> Iterator[ShardCheck]:
    for name, split in (("train", manifest.train), ("val", manifest.val)):
        labels, index = (
            np.repeat(np.arange(len(manifest.classes)), split.class_counts),
            _load_index(folder, name, split),
        )
        start = 0
        for number, entry in enumerate(split.shards):
            stop = start + entry.images
            yield ShardCheck(folder / entry.file, number, entry, index[start:stop], labels[start:stop])
            start = stop


def _load_index(folder: Path, name: str, split: SplitEntry) -> np.ndarray:
    path = folder / index_file(name)
    if file_sha256(path) != split.index_sha256:
        raise RequestError(f"{path}", "its SHA-256 is not that of the manifest", "copy it again or pack again")
    return np.load(path, mmap_mode="r")
