"""What `--data_path` names: which data set in which layout, found without reading it all."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from image_classification.data import archive, arrays, cifar, folder
from image_classification.data.folder import BIG_IMAGE_SIZE, shorten
from image_classification.data.records.manifest import is_records_folder, read_manifest
from mmcls.utils.errors import RequestError

CIFAR_IMAGE_SIZE, DIGITS_IMAGE_SIZE = 32, 16
EXPECTED = (
    "train/ and val/ with a folder for each class, or records, or the files or the .tar.gz of CIFAR-10 or CIFAR-100"
)


@dataclass(frozen=True)
class DataLayout:
    """A data set that was found and looks usable.

    Args:
        kind: how it is read.
        path: the folder, or the archive until `prepare_data` has unpacked it; None where there is none.
        description: one line for people.
        image_size: size to train at unless the user gives one, in pixels.
        num_classes: classes of its labels.
        small_images: the images are about as small as CIFAR's.
        warnings: what is odd about it, one line each.
    """

    kind: Literal["folder", "records", "cifar10", "cifar100", "digits", "synthetic"]
    path: Path | None
    description: str
    image_size: int
    num_classes: int
    small_images: bool
    warnings: tuple[str, ...] = ()


def detect_layout(data_path: str, allow_empty_classes: bool = False) -> DataLayout:
    """Finds out what a path holds and checks that it is complete.

    `digits` and `synthetic` are the data sets of these names; `./digits` is a folder.

    Raises:
        RequestError: nothing known is there, or it is incomplete, damaged or ambiguous.
    """
    if data_path == "digits":
        return DataLayout("digits", None, "digits of scikit-learn", DIGITS_IMAGE_SIZE, 10, True)
    if data_path == "synthetic":
        classes = arrays.SYNTHETIC_CLASSES
        return DataLayout("synthetic", None, "synthetic: random pixels", BIG_IMAGE_SIZE, classes, False)
    path = absolute_path(data_path)
    try:
        return _detect_at(path, allow_empty_classes)
    except OSError as error:
        raise RequestError(
            f"--data_path={path}", f"cannot read {error.filename}: {error.strerror}", "make it readable"
        ) from error


def absolute_path(data_path: str) -> Path:
    """The path that the user means: `~` is the home folder unless something of that name is here."""
    return Path(os.path.abspath(data_path if os.path.lexists(data_path) else os.path.expanduser(data_path)))


def _detect_at(path: Path, allow_empty_classes: bool) -> DataLayout:
    if not path.exists():
        raise _nothing_there(path)
    if path.is_file():
        if not path.name.lower().endswith(archive.ENDINGS):
            raise _not_found(path, f"a file of {path.stat().st_size:,} bytes")
        return _archive_layout(path)
    if (path / "train").is_dir() and (path / "val").is_dir():
        return _folder_layout(path, allow_empty_classes)
    if is_records_folder(path):
        return _records_layout(path)
    found = _find_cifar(path)
    if found is None:
        raise _not_found(path, _entries(path))
    return _archive_layout(found) if found.is_file() else _cifar_layout(found)


def prepare_data(layout: DataLayout) -> DataLayout:
    """Unpacks an archive; once on each machine, before the ranks. Other layouts come back as they are.

    Several processes may call it at once: one unpacks and the others take what it has made.

    Raises:
        RequestError: it cannot be unpacked.
    """
    if layout.path is None or not layout.path.is_file():
        return layout
    unpacked, by_us = archive.unpack(layout.path, archive.identify(layout.path))
    return _unpacked_layout(unpacked, layout.path, "now" if by_us else "before")


def _cifar_layout(path: Path) -> DataLayout:
    version = cifar.version_of_folder(path)
    return _cifar(version, path, cifar.check_folder(path, version))


def _cifar(version: cifar.CifarVersion, path: Path, warnings: tuple[str, ...] = ()) -> DataLayout:
    description = f"{version.title}, in {path}"
    return DataLayout(version.kind, path, description, CIFAR_IMAGE_SIZE, version.num_classes, True, warnings)


def _archive_layout(path: Path) -> DataLayout:
    version = archive.identify(path)
    unpacked = archive.unpacked_folder(path, version)
    if unpacked is not None:
        return _unpacked_layout(unpacked, path, "before")
    archive.check_archive(path, version)
    return _cifar(version, path)


def _unpacked_layout(unpacked: Path, path: Path, when: str) -> DataLayout:
    found = _cifar_layout(unpacked)
    return replace(found, description=f"{found.description} (unpacked {when} from {path})")


def _folder_layout(path: Path, allow_empty_classes: bool) -> DataLayout:
    scan = folder.scan_folders(path, allow_empty_classes)
    classes = len(scan.class_names)
    return DataLayout(
        "folder",
        path,
        f"image folder with {classes} classes, in {path}",
        scan.image_size,
        classes,
        scan.small_images,
        scan.warnings,
    )


def _records_layout(path: Path) -> DataLayout:
    manifest = read_manifest(path)
    warnings = []
    for split in ("train", "val"):
        counts = getattr(manifest, split).class_counts
        empty = [name for name, count in zip(manifest.classes, counts) if not count]
        if empty:
            warnings.append(f"{split} has no image in: {shorten(empty)}")
    left_out = manifest.train.left_out + manifest.val.left_out
    if left_out:
        warnings.append(f"{left_out:,} images that could not be read were left out when it was packed")
    classes = len(manifest.classes)
    description = f"records of {classes} classes, in {path}"
    return DataLayout(
        "records", path, description, manifest.image_size, classes, manifest.small_images, tuple(warnings)
    )


def _find_cifar(path: Path) -> Path | None:
    """The folder of CIFAR files in or at a path, or else the archive in it.

    Raises:
        RequestError: CIFAR-10 and CIFAR-100 are both there.
    """
    if cifar.version_of_folder(path):
        return path
    for names in ([v.folder for v in cifar.VERSIONS], [v.archive for v in cifar.VERSIONS]):
        found = {}
        for version, name in zip(cifar.VERSIONS, names):
            if (path / name).exists():
                # Python and binary version hold the same images: the first of them does.
                found.setdefault(version.kind, path / name)
        if len(found) > 1:
            both = " and ".join(p.name for p in found.values())
            raise RequestError(f"--data_path={path}", f"holds {both}", "give the path of one of them")
        if found:
            return next(iter(found.values()))
    return None


def _nothing_there(path: Path) -> RequestError:
    parent = next(p for p in path.parents if p.is_dir())
    return RequestError(
        f"--data_path={path}",
        f"expected {EXPECTED}; found: no such file or folder, in {parent} there are: {_entries(parent)}",
        "check the path, or give digits or synthetic",
    )


def _not_found(path: Path, found: str) -> RequestError:
    remedy = "give the folder that holds them, or digits, or synthetic"
    if path.name in ("train", "val") and path.is_dir():
        remedy = f"this is the {path.name}/ folder itself, give {path.parent}"
    elif path.is_dir():
        inner = [child for child in _children(path) if _looks_usable(child)]
        if inner:
            remedy = f"for instance --data_path={inner[0]}"
        elif (path / "train").is_dir():
            remedy = "add val/ with the same class folders as train/"
    return RequestError(f"--data_path={path}", f"expected {EXPECTED}; found: {found}", remedy)


def _looks_usable(path: Path) -> bool:
    if (path / "train").is_dir() and (path / "val").is_dir() or is_records_folder(path):
        return True
    return cifar.version_of_folder(path) is not None


def _children(path: Path) -> list[Path]:
    try:
        return sorted(child for child in path.iterdir() if child.is_dir())
    except OSError:
        return []


def _entries(path: Path) -> str:
    try:
        return shorten(sorted(os.listdir(path))) or "nothing, it is empty"
    except OSError as error:
        return f"unreadable ({error.strerror})"
