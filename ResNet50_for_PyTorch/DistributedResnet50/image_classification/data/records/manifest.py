"""manifest.json: what a records folder holds. It is written last, so a folder that has one is complete."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from image_classification.data.folder import shorten
from mmcls.utils.errors import RequestError

MANIFEST = "manifest.json"
BAD_FILES = "bad_files.txt"
UNFINISHED = "unfinished"
"""Folder of what is not complete yet; gone when the manifest is there."""
_FORMAT, _VERSION = "image-classification-records", 1


@dataclass(frozen=True)
class StoreOptions:
    """What becomes of the pictures.

    Args:
        resize_short: pictures with a longer short side are reduced to it, in pixels.
        max_side: pictures with a longer long side are reduced to it, in pixels; not together with resize_short.
        quality: of the JPEG files that reduced pictures become, 1 to 100. Others keep their bytes.
        shard_bytes: about how large a shard becomes at most.
    """

    resize_short: int | None = None
    max_side: int | None = None
    quality: int = 90
    shard_bytes: int = 2**30


@dataclass(frozen=True)
class ShardEntry:
    """A shard's file name, number of pictures, size and SHA-256."""

    file: str
    images: int
    bytes: int
    sha256: str


@dataclass(frozen=True)
class SplitEntry:
    """Train or val.

    Args:
        class_counts: pictures of each class; they lie in the order of the classes.
        left_out: pictures that could not be read.
        index_sha256: of the file that says where the pictures lie in the shards.
        shards: in the order of the pictures.
    """

    class_counts: tuple[int, ...]
    left_out: int
    index_sha256: str
    shards: tuple[ShardEntry, ...]

    @property
    def images(self) -> int:
        return sum(self.class_counts)

    @property
    def bytes(self) -> int:
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """A records folder.

    Args:
        classes: their names; a label is a place here.
        image_size: size to train at unless the user gives one, in pixels.
        small_images: the pictures are about as small as CIFAR's.
        options: with which it was packed.
        source_sha256: of the names of the pictures and the classes that it was packed from.
        train, val: the pictures.
    """

    classes: tuple[str, ...]
    image_size: int
    small_images: bool
    options: StoreOptions
    source_sha256: str
    train: SplitEntry
    val: SplitEntry


def index_file(split: str) -> str:
    """The name of the file that says where the pictures of a split lie in its shards."""
    return f"{split}.index.npy"


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Writes it in one step: it is there as a whole or not at all."""
    write_json(folder / MANIFEST, {"format": _FORMAT, "version": _VERSION, **asdict(manifest)})


def read_manifest(folder: Path) -> Manifest:
    """Reads it and checks that the shards are there.

    Raises:
        RequestError: there is none, or it is damaged, or a shard is missing or of another size.
    """
    subject, path = f"--data_path={folder}", folder / MANIFEST
    if not path.exists():
        if (folder / UNFINISHED).is_dir():
            raise RequestError(subject, "packing it has not finished", "give the same pack command again to continue")
        raise RequestError(
            subject, f"holds no {MANIFEST}", "give a folder that records pack has made, or copy it again"
        )
    try:
        # Names of any bytes are escaped in JSON, so the file itself is ASCII.
        content = json.loads(path.read_text(encoding="ascii"))
        version = content["version"] if content["format"] == _FORMAT else None
        manifest = _from_json(content) if version == _VERSION else None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise RequestError(f"{path}", f"is damaged: {type(error).__name__}: {error}", "pack again") from error
    if manifest is None:
        found = "is not a manifest of records" if version is None else f"has version {version}, not {_VERSION}"
        raise RequestError(f"{path}", found, "pack again with this program")
    _check_shards(folder, manifest)
    return manifest


def is_records_folder(folder: Path) -> bool:
    """Whether a folder holds records, complete or not; not whether they are whole."""
    begun = folder / UNFINISHED / "plan.json", folder / index_file("train")
    return any(map(Path.exists, begun)) or _claims_to_be_ours(folder / MANIFEST)


def write_json(path: Path, content: object) -> None:
    """Writes a JSON file in one step, on the disk when this returns."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="ascii") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _claims_to_be_ours(path: Path) -> bool:
    # Others have files of this name too, and a damaged one of ours still begins like this.
    try:
        with path.open("rb") as file:
            return _FORMAT.encode() in file.read(100)
    except (FileNotFoundError, NotADirectoryError):
        return False


def _from_json(content: dict) -> Manifest:
    return Manifest(
        classes=tuple(content["classes"]),
        image_size=content["image_size"],
        small_images=content["small_images"],
        options=StoreOptions(**content["options"]),
        source_sha256=content["source_sha256"],
        train=_split_from_json(content["train"]),
        val=_split_from_json(content["val"]),
    )


def _split_from_json(content: dict) -> SplitEntry:
    shards = tuple(ShardEntry(**shard) for shard in content["shards"])
    split = SplitEntry(tuple(content["class_counts"]), content["left_out"], content["index_sha256"], shards)
    if split.images != sum(shard.images for shard in shards):
        raise ValueError("the counts of classes and shards differ")
    return split


def _check_shards(folder: Path, manifest: Manifest) -> None:
    wrong = [f"{name} is missing" for name in map(index_file, ("train", "val")) if not (folder / name).exists()]
    for shard in (*manifest.train.shards, *manifest.val.shards):
        path = folder / shard.file
        size = path.stat().st_size if path.exists() else None
        if size is None:
            wrong.append(f"{shard.file} is missing")
        elif size != shard.bytes:
            wrong.append(f"{shard.file} has {size:,} of {shard.bytes:,} bytes")
    if wrong:
        raise RequestError(f"--data_path={folder}", shorten(wrong), "copy them again or pack again")
