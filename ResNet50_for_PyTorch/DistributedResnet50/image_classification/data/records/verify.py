"""Reads a records folder back: every shard's checksum, and every picture."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from image_classification.data.decode import DecodeError, Picture
from image_classification.data.folder import shorten
from image_classification.data.layouts import absolute_path
from image_classification.data.records.manifest import Manifest, ShardEntry, read_manifest
from image_classification.data.records.processes import Advance, run_tasks
from image_classification.data.records.shards import Shard, file_sha256
from mmcls.utils.errors import RequestError

PROBLEMS_SHOWN = 5


@dataclass(frozen=True)
class ShardCheck:
    """A shard to read, what the manifest says about it, and the labels that its pictures should have."""

    path: Path
    entry: ShardEntry
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
        shard = Shard(check.path)
    except (OSError, DecodeError) as error:
        return check.entry.file, [*problems, f"{check.path}: {error}"]
    if len(shard) != check.entry.images:
        problems.append(f"{check.path}: holds {len(shard)} images, expected {check.entry.images}")
    for row, label in enumerate(check.labels[: len(shard)].tolist()):
        try:
            Picture(shard.image(row)).pixels()
            if shard.label(row) != label:
                raise DecodeError(f"its label is {shard.label(row)}, expected {label}")
        except DecodeError as error:
            problems.append(f"{check.path}, record {row}: {error}")
        advance()
    return check.entry.file, problems


def _checks(folder: Path, manifest: Manifest) -> Iterator[ShardCheck]:
    for split in (manifest.train, manifest.val):
        labels, start = np.repeat(np.arange(len(manifest.classes)), split.class_counts), 0
        for entry in split.shards:
            yield ShardCheck(folder / entry.file, entry, labels[start : start + entry.images])
            start += entry.images
