"""Image folders: `train/<class>/` and `val/<class>/`, the layout of ImageNet and of most people's own pictures."""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from statistics import median

import numpy as np

from image_classification.data.decode import ENDINGS, DecodeError, Picture, read_file
from image_classification.data.pictures import PictureDataset
from mmcls.utils.errors import RequestError

BIG_IMAGE_SIZE = 224
SMALL_SHORT_SIDE = 96
"""Pictures up to this short side are trained at their own size instead of BIG_IMAGE_SIZE."""
PROBED_CLASSES, PROBED_IMAGES = 9, 20
NAMES_SHOWN = 5


def printable(text: str) -> str:
    """Names on one line, whatever they hold: line breaks and bytes that are no text are written as escapes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def shorten(names: Iterable[str]) -> str:
    """The first five names and how many there are: fits one line of an error, whatever the names hold."""
    names = list(names)
    shown = ", ".join(map(printable, names[:NAMES_SHOWN]))
    return shown if len(names) <= NAMES_SHOWN else f"{shown}, ... ({len(names):,} in all)"


@dataclass(frozen=True)
class FolderScan:
    """What a look at the folders says, without listing every picture.

    Args:
        class_names: the class folders of train/, sorted; a class's label is its place here.
        image_size: size to train at unless the user gives one, in pixels.
        small_images: the pictures are small (CIFAR-like), so they are not cropped to a part of their area.
        warnings: one line each.
    """

    class_names: tuple[str, ...]
    image_size: int
    small_images: bool
    warnings: tuple[str, ...]


def scan_folders(root: Path, allow_empty_classes: bool) -> FolderScan:
    """Checks the class folders of train/ and val/ and probes a few pictures for their size.

    Raises:
        RequestError: no class folders, an empty class, a class of val/ that train/ does not have, nothing readable.
    """
    classes, loose, hidden = _list_split(root / "train")
    val_classes, val_loose, val_hidden = _list_split(root / "val")
    warnings = []
    dotted = [f"train/{name}" for name in hidden] + [f"val/{name}" for name in val_hidden]
    if dotted:
        warnings.append(f"ignored names that begin with a dot: {shorten(dotted)}")
    for split, names in (("train", loose), ("val", val_loose)):
        if names:
            warnings.append(f"{split}/ has images outside its class folders, ignored: {shorten(names)}")

    first_images = {name: _first_image(root / "train" / name) for name in classes}
    _check_train(root, first_images, loose, allow_empty_classes)
    empty = [name for name, image in first_images.items() if image is None]
    if empty:
        warnings.append(f"train/ has no image in: {shorten(empty)}")
    without_val = _check_val(root, classes, val_classes, val_loose)
    if without_val:
        warnings.append(f"val/ has no image in: {shorten(without_val)}")

    side = _typical_short_side([root / "train" / name for name, image in first_images.items() if image is not None])
    small = side <= SMALL_SHORT_SIDE
    size = max(8, int(side / 8 + 0.5) * 8) if small else BIG_IMAGE_SIZE
    return FolderScan(tuple(classes), size, small, tuple(warnings))


def _list_split(folder: Path) -> tuple[list[str], list[str], list[str]]:
    """Class folders, loose images and dot-names of train/ or val/, each sorted."""
    classes, loose, hidden = [], [], []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                hidden.append(entry.name)
            elif entry.is_dir():
                classes.append(entry.name)
            elif _is_image_name(entry.name):
                loose.append(entry.name)
    return sorted(classes), sorted(loose), sorted(hidden)


def _is_image_name(name: str) -> bool:
    return os.path.splitext(name)[1].lower() in ENDINGS


def _images_below(folder: Path, prefix: str = "", hidden: list[str] | None = None) -> Iterator[str]:
    """Paths of the images below a class folder, relative to it, in the order of the disk.

    Names that begin with a dot are left out, and added to `hidden`.
    """
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith("."):
                if hidden is not None:
                    hidden.append(entry.path)
            # Links to folders are not followed: they can lead back here.
            elif entry.is_dir(follow_symlinks=False):
                yield from _images_below(Path(entry.path), f"{prefix}{entry.name}/", hidden)
            # Opening a pipe or a device would wait for ever; links are judged when they are read.
            elif _is_image_name(entry.name) and (entry.is_symlink() or entry.is_file()):
                yield prefix + entry.name


def _first_image(folder: Path) -> Path | None:
    name = next(_images_below(folder), None)
    return None if name is None else folder / name


def _check_train(root: Path, first_images: dict[str, Path | None], loose: list[str], allow_empty: bool) -> None:
    subject = f"--data_path={root}"
    empty = [name for name, image in first_images.items() if image is None]
    if len(empty) == len(first_images):
        found = f"train/ has {len(loose):,} images but no class folders" if loose else "train/ has no images"
        raise RequestError(subject, found, "put them into train/<class>/ and val/<class>/, a folder for each class")
    if empty and not allow_empty:
        raise RequestError(
            subject,
            f"train/ has no image in {len(empty)} of {len(first_images)} class folders: {shorten(empty)}",
            "remove or fill them, or pass --allow_empty_classes to keep their labels"
            f" (images end in {' '.join(sorted(ENDINGS))})",
        )


def _check_val(root: Path, classes: list[str], val_classes: list[str], loose: list[str]) -> list[str]:
    """Returns the classes that val/ has no image of."""
    subject = f"--data_path={root}"
    unknown = sorted(set(val_classes) - set(classes))
    filled = [name for name in val_classes if _first_image(root / "val" / name)]
    if not filled:
        found = f"val/ has {len(loose):,} images but no class folders" if loose else "val/ has no images"
        raise RequestError(subject, found, "sort them into val/<wnid>/ (see README.md, your own pictures)")
    if unknown:
        raise RequestError(
            subject,
            f"val/ has class folders that train/ does not have: {shorten(unknown)}",
            "give train/ and val/ the same class folders",
        )
    return sorted(set(classes) - set(filled))


def _typical_short_side(folders: list[Path]) -> float:
    """Median short side in pixels of the first readable image of a few classes."""
    sides, failed = [], []
    for folder in folders[:: max(1, len(folders) // PROBED_CLASSES)]:
        for name in islice(_images_below(folder), PROBED_IMAGES):
            try:
                picture = Picture(read_file(folder / name))
            except DecodeError as error:
                failed.append(f"{folder / name} ({error})")
            else:
                sides.append(min(picture.width, picture.height))
                break
    if not sides:
        raise RequestError(
            f"--data_path={folders[0].parents[1]}",
            f"none of the images tried can be read: {shorten(failed)}",
            "replace them",
        )
    return median(sides)


class FolderDataset(PictureDataset):
    """The images of train/ or val/, in the order of class and name.

    File names lie in one block of bytes, not in a list: a list of a million strings is copied into every loader process
    bit by bit as their reference counts change.

    Args:
        root: the folder that holds train/ and val/; the other arguments are those of PictureDataset.

    Attributes:
        hidden: the files left out because their names begin with a dot.
    """

    def __init__(self, root: Path, split: str, class_names: tuple[str, ...], **options):
        self.root = root / split
        self._folders = [f"{self.root / name}{os.sep}" for name in class_names]
        self.hidden: list[str] = []
        names: list[bytes] = []
        counts: list[int] = []
        for class_name in class_names:
            folder = self.root / class_name
            found = sorted(_images_below(folder, hidden=self.hidden)) if folder.is_dir() else []
            names += map(os.fsencode, found)
            counts.append(len(found))
        self._names = np.frombuffer(b"".join(names), dtype=np.uint8)
        self._ends = np.cumsum([0, *map(len, names)])
        labels = np.repeat(np.arange(len(class_names), dtype=np.int32), counts)
        super().__init__(split, class_names, labels, **options)

    def path(self, index: int) -> Path:
        """The file of one image."""
        return Path(self.name(index))

    def name(self, index: int) -> str:
        name = os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]].tobytes())
        return f"{self._folders[self.labels[index]]}{name}"

    def encoded(self, index: int) -> bytes:
        return read_file(self.name(index))
