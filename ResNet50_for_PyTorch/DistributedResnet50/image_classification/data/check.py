"""Reading a whole data set before it is trained on: what `--check_data` does."""

from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np

from image_classification.config import DataConfig
from image_classification.data.datasets import Datasets, open_datasets
from image_classification.data.decode import DecodeError, ImageReadError, Picture, read_file
from image_classification.data.folder import FolderDataset, printable
from image_classification.data.layouts import DataLayout
from image_classification.data.processes import Advance, default_workers, run_tasks
from mmcls.utils.errors import RequestError

CHUNK = 128


@dataclass(frozen=True)
class Chunk:
    """Neighbouring pictures of a split: the first one's number, and their files."""

    split: str
    start: int
    names: tuple[str, ...]


def check_data(layout: DataLayout, config: DataConfig, report: Callable[[str], object]) -> None:
    """Decodes every picture, with `config.workers` processes or one a core.

    Args:
        report: told what was found, a line each.

    Raises:
        RequestError: a picture cannot be read, or a class folder of train/ is empty and that is not allowed.
    """
    workers = config.workers or default_workers()
    if layout.kind == "records":
        # Here, because pyarrow is 45 MB of memory in each process, and only records need it.
        from image_classification.data.records.verify import verify

        manifest = verify(str(layout.path), workers=workers, report=report)
        report(f"checked {manifest.train.images:,} training and {manifest.val.images:,} validation images: all whole")
        return
    datasets = open_datasets(layout, replace(config, allow_empty_classes=True), layout.image_size)
    for warning in (*layout.warnings, *datasets.warnings):
        report(warning)
    splits = {"train": datasets.train, "val": datasets.val}
    bad = _unreadable(splits, workers, report) if layout.kind == "folder" else {"train": 0, "val": 0}
    for split, dataset in splits.items():
        report(f"checked {len(dataset):,} {split} images: {bad[split]:,} cannot be read")
    empty = _empty_classes(datasets, report) if layout.kind == "folder" else []
    problems = []
    if sum(bad.values()):
        total = sum(map(len, splits.values()))
        problems.append((f"images that cannot be read: {sum(bad.values()):,} of {total:,}",
                         "replace or remove them, or train with --on_bad_image=skip"))  # fmt: skip
    if empty and not config.allow_empty_classes:
        problems.append((f"classes of train/ without an image: {len(empty):,}",
                         "fill or remove them, or pass --allow_empty_classes"))  # fmt: skip
    if problems:
        found, remedies = zip(*problems)
        raise RequestError(f"--data_path={layout.path}", " and ".join(found), "; ".join(remedies))


def _unreadable(splits: dict[str, FolderDataset], workers: int, report: Callable[[str], object]) -> dict[str, int]:
    """Tells about every picture that cannot be decoded; returns how many there are in each split."""
    bad = dict.fromkeys(splits, 0)
    total = sum(map(len, splits.values()))
    results = run_tasks(check_files, _chunks(splits), workers=workers, title="checking", total=total)
    with closing(results):
        for chunk, failures in results:
            dataset = splits[chunk.split]
            bad[chunk.split] += len(failures)
            for place, reason in failures:
                class_name = dataset.class_names[dataset.labels[chunk.start + place]]
                report(printable(str(ImageReadError(chunk.names[place], class_name, chunk.split, reason))))
    return bad


def _chunks(splits: dict[str, FolderDataset]) -> Iterator[Chunk]:
    # Names instead of the data set: that holds all names, and would be sent with every task.
    for split, dataset in splits.items():
        for start in range(0, len(dataset), CHUNK):
            names = tuple(dataset.name(index) for index in range(start, min(start + CHUNK, len(dataset))))
            yield Chunk(split, start, names)


def check_files(chunk: Chunk, advance: Advance) -> tuple[Chunk, list[tuple[int, str]]]:
    """Decodes the files of a chunk; returns the places and reasons of those that cannot be."""
    failures = []
    for place, name in enumerate(chunk.names):
        try:
            Picture(read_file(name)).pixels()
        except DecodeError as error:
            failures.append((place, str(error)))
        advance()
    return chunk, failures


def _empty_classes(datasets: Datasets, report: Callable[[str], object]) -> list[str]:
    """Tells about classes without images; returns those of train/."""
    empty = {}
    for split, dataset in (("train", datasets.train), ("val", datasets.val)):
        counts = np.bincount(dataset.labels, minlength=len(datasets.class_names))
        empty[split] = [name for name, count in zip(datasets.class_names, counts) if count == 0]
        for name in empty[split]:
            report(f"empty class: {split}/{printable(name)}")
    return empty["train"]
