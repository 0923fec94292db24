"""Packs an image folder into records: in parallel, and continued where it was interrupted."""

import fcntl
import os
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np

from image_classification.data.decode import DecodeError, read_file
from image_classification.data.folder import FolderDataset, scan_folders, shorten
from image_classification.data.layouts import absolute_path, detect_layout
from image_classification.data.processes import Advance, run_tasks
from image_classification.data.records.index import file_sha256
from image_classification.data.records.manifest import (
    BAD_FILES,
    MANIFEST,
    UNFINISHED,
    Manifest,
    ShardEntry,
    SplitEntry,
    StoreOptions,
    index_file,
    read_manifest,
    write_manifest,
)
from image_classification.data.records.plan import (
    FinishedShard,
    Plan,
    ShardTask,
    index_part,
    open_plan,
    read_finished,
    relative_name,
    source_sha256,
    write_finished,
)
from image_classification.data.records.shards import Record, read_index, write_shard
from image_classification.data.records.store import stored_bytes
from mmcls.utils.errors import RequestError

CONTINUE = "give the same command again to continue"


@dataclass(frozen=True)
class ShardWork:
    """What a process needs to make a shard.

    Args:
        out: the records folder.
        task: the shard.
        root: train/ or val/ of the image folder.
        names: of the pictures, below root.
        labels: theirs.
        skip_bad: leave out pictures that cannot be decoded.
    """

    out: Path
    task: ShardTask
    root: Path
    names: tuple[str, ...]
    labels: tuple[int, ...]
    options: StoreOptions
    skip_bad: bool


def pack(
    data_path: str,
    out: str,
    options: StoreOptions,
    *,
    workers: int,
    on_bad_image: Literal["stop", "skip"] = "stop",
    allow_empty_classes: bool = False,
) -> Manifest:
    """Packs train/ and val/ of an image folder; shards that an earlier run has finished are not made again.

    Args:
        out: the folder to make.
        workers: processes.
        on_bad_image: what a picture that cannot be decoded does: stop, or be left out and listed in bad_files.txt.

    Raises:
        RequestError: the request cannot be carried out, or a picture cannot be decoded, or the disk is full.
    """
    source, splits, image_size, small_images = _open_source(data_path, allow_empty_classes)
    target = absolute_path(out)
    if any(target.is_relative_to(source / split) for split in ("train", "val")):
        raise RequestError(f"--out={target}", "lies among the pictures to pack", "give a folder outside them")
    digest = source_sha256(splits)
    if (target / MANIFEST).exists():
        return _already_packed(target, options, digest)
    _prepare(target)
    with _alone(target):
        plan = open_plan(target, splits, options, digest)
        finished = _make_shards(target, plan, splits, workers, on_bad_image == "skip")
        entries = {split: _split_entry(target, dataset, plan, finished) for split, dataset in splits.items()}
        for split, entry in entries.items():
            if not entry.images:
                raise RequestError(f"--data_path={source}", f"no image of {split}/ can be read", "replace them")
        _write_bad_files(target, [bad for task in plan.tasks for bad in finished[task.file].bad])
        manifest = Manifest(splits["train"].class_names, image_size, small_images, options, digest, **entries)
        write_manifest(target, manifest)
        shutil.rmtree(target / UNFINISHED)
    return manifest


def _open_source(data_path: str, allow_empty_classes: bool) -> tuple[Path, dict[str, FolderDataset], int, bool]:
    """The folder, its splits, the size to train at, and whether its pictures are small."""
    subject, layout = f"--data_path={data_path}", detect_layout(data_path, allow_empty_classes)
    if layout.kind == "records":
        raise RequestError(subject, "is packed already", "train with it")
    if layout.kind != "folder":
        raise RequestError(subject, f"{layout.description}: is read into memory as a whole", "train with it as it is")
    class_names = scan_folders(layout.path, allow_empty_classes).class_names
    ones = (1.0, 1.0, 1.0)
    splits = {
        split: FolderDataset(
            layout.path,
            split,
            class_names,
            image_size=layout.image_size,
            small_images=layout.small_images,
            mean=ones,
            std=ones,
        )
        for split in ("train", "val")
    }
    return layout.path, splits, layout.image_size, layout.small_images


def _already_packed(target: Path, options: StoreOptions, digest: str) -> Manifest:
    manifest = read_manifest(target)
    if manifest.options != options or manifest.source_sha256 != digest:
        what = "with other options" if manifest.options != options else "from another list of pictures"
        raise RequestError(f"--out={target}", f"holds records packed {what}", "take another folder or remove it")
    # Where the last run ended between the manifest and this.
    shutil.rmtree(target / UNFINISHED, ignore_errors=True)
    return manifest


def _prepare(target: Path) -> None:
    try:
        (target / UNFINISHED).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RequestError(f"--out={target}", f"cannot be made: {error.strerror}", "give another folder") from error


@contextmanager
def _alone(target: Path) -> Iterator[None]:
    """Keeps a second pack out of the folder; the system lets go when this process ends, however it ends."""
    with (target / UNFINISHED / "lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RequestError(f"--out={target}", "is being packed by another process", "wait for it") from None
        except OSError:
            pass  # some network file systems have no locks
        foreign = set(os.listdir(target)) - {UNFINISHED}
        if foreign and not (target / UNFINISHED / "plan.json").exists():
            shutil.rmtree(target / UNFINISHED)
            raise RequestError(f"--out={target}", f"is not empty: {shorten(sorted(foreign))}", "give a new folder")
        yield


def _make_shards(
    target: Path, plan: Plan, splits: dict[str, FolderDataset], workers: int, skip_bad: bool
) -> dict[str, FinishedShard]:
    finished = {task.file: done for task in plan.tasks if (done := read_finished(target, task))}
    _check_space(target, plan, sum(shard.entry.bytes for shard in finished.values()))
    missing = [task for task in plan.tasks if task.file not in finished]
    work = (_work(target, task, splits[task.split], plan.options, skip_bad) for task in missing)
    total = sum(task.stop - task.start for task in plan.tasks)
    left = sum(task.stop - task.start for task in missing)
    results = run_tasks(make_shard, work, workers=workers, title="packing", total=total, done=total - left)
    with closing(results):
        for shard in results:
            if shard.bad and not skip_bad:
                raise _bad_pictures(shard.bad)
            finished[shard.entry.file] = shard
    return finished


def make_shard(work: ShardWork, advance: Advance) -> FinishedShard:
    """Makes a shard: under another name, then on the disk, then renamed, then noted as complete.

    A shard with bad pictures is not complete unless they are to be skipped.

    Raises:
        RequestError: it cannot be written.
    """
    counts, bad = Counter(), []

    def records() -> Iterator[Record]:
        for name, label in zip(work.names, work.labels):
            try:
                stored = stored_bytes(read_file(work.root / name), work.options)
            except DecodeError as error:
                bad.append((str(work.root / name), str(error)))
            else:
                counts[label] += 1
                yield Record(stored, label, name)
            advance()

    file = work.task.file
    temporary = work.out / UNFINISHED / file
    try:
        images = write_shard(temporary, records())
        entry = ShardEntry(file, images, temporary.stat().st_size, file_sha256(temporary))
        shard = FinishedShard(entry, dict(counts), tuple(bad))
        if bad and not work.skip_bad:
            temporary.unlink()
        else:
            _save(index_part(work.out, file), read_index(temporary, work.task.number)[0])
            temporary.replace(work.out / file)
            write_finished(work.out, shard)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise RequestError(f"--out={work.out}", f"cannot write {file}: {error.strerror or error}", CONTINUE) from error
    return shard


def _work(target: Path, task: ShardTask, dataset: FolderDataset, options: StoreOptions, skip_bad: bool) -> ShardWork:
    names = tuple(relative_name(dataset, index) for index in range(task.start, task.stop))
    labels = tuple(dataset.labels[task.start : task.stop].tolist())
    return ShardWork(target, task, dataset.root, names, labels, options, skip_bad)


def _check_space(target: Path, plan: Plan, done_bytes: int) -> None:
    needed, free = plan.stored_bytes - done_bytes, shutil.disk_usage(target).free
    if needed > free:
        raise RequestError(
            f"--out={target}",
            f"needs about {needed / 2**30:,.1f} GiB more, the disk has {free / 2**30:,.1f} GiB free",
            "free some, or take another folder, or reduce the pictures (--resize_short)",
        )


def _bad_pictures(bad: tuple[tuple[str, str], ...]) -> RequestError:
    names = shorten(f"{path} ({reason})" for path, reason in bad)
    return RequestError(
        "pack", f"cannot read {names}", f"replace them and {CONTINUE}, with --on_bad_image=skip to leave them out"
    )


def _split_entry(target: Path, dataset: FolderDataset, plan: Plan, finished: dict[str, FinishedShard]) -> SplitEntry:
    """Puts the shards of a split together, and writes its index."""
    split = dataset.split
    shards = [finished[task.file] for task in plan.tasks if task.split == split]
    counts = Counter()
    for shard in shards:
        counts.update(shard.class_counts)
    index = target / index_file(split)
    _save(index, np.concatenate([np.load(index_part(target, shard.entry.file)) for shard in shards]))
    return SplitEntry(
        tuple(counts[label] for label in range(len(dataset.class_names))),
        sum(len(shard.bad) for shard in shards),
        file_sha256(index),
        tuple(shard.entry for shard in shards),
    )


def _save(path: Path, index: np.ndarray) -> None:
    with path.open("wb") as file:
        np.save(file, index)
        file.flush()
        os.fsync(file.fileno())


def _write_bad_files(target: Path, bad: list[tuple[str, str]]) -> None:
    if bad:
        text = "".join(f"{path}\t{reason}\n" for path, reason in bad)
        (target / BAD_FILES).write_bytes(os.fsencode(text))
