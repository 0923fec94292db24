"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009), python and binary version, as a folder of the published files."""

import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mmcls.utils.errors import RequestError

IMAGE_SIDE = 32
IMAGE_BYTES = 3 * IMAGE_SIDE * IMAGE_SIDE


@dataclass(frozen=True)
class CifarVersion:
    """Files of one published version.

    Args:
        kind: the data set, as in DataLayout.
        title: for people.
        folder: name of the folder inside the archive.
        train_files, test_file, names_file: names in that folder.
        archive, archive_bytes: name and size of the published archive.
        images_per_file: images in a published training file; the test file has 10,000.
        num_classes: fine classes.
        label_bytes: bytes before the pixels of a binary record, of which the last is the fine label; 0 for pickles.
    """

    kind: str
    title: str
    folder: str
    train_files: tuple[str, ...]
    test_file: str
    names_file: str
    archive: str
    archive_bytes: int
    images_per_file: int
    num_classes: int
    label_bytes: int

    @property
    def data_files(self) -> tuple[str, ...]:
        return (*self.train_files, self.test_file)

    def published_images(self, name: str) -> int:
        """Images in a published file."""
        return 10_000 if name == self.test_file else self.images_per_file


VERSIONS = (
    CifarVersion(
        "cifar10", "CIFAR-10, python version", "cifar-10-batches-py",
        tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch", "batches.meta",
        "cifar-10-python.tar.gz", 170_498_071, 10_000, 10, 0,
    ),
    CifarVersion(
        "cifar10", "CIFAR-10, binary version", "cifar-10-batches-bin",
        tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin", "batches.meta.txt",
        "cifar-10-binary.tar.gz", 170_052_171, 10_000, 10, 1,
    ),
    CifarVersion(
        "cifar100", "CIFAR-100, python version", "cifar-100-python", ("train",), "test", "meta",
        "cifar-100-python.tar.gz", 169_001_437, 50_000, 100, 0,
    ),
    CifarVersion(
        "cifar100", "CIFAR-100, binary version", "cifar-100-binary", ("train.bin",), "test.bin",
        "fine_label_names.txt", "cifar-100-binary.tar.gz", 168_513_733, 50_000, 100, 2,
    ),
)  # fmt: skip


def version_of_folder(folder: Path) -> CifarVersion | None:
    """The version whose files this folder holds or, by its name, should hold."""
    for version in VERSIONS:
        named = folder.name == version.folder and folder.is_dir()
        if named or any((folder / name).is_file() for name in version.train_files):
            return version
    return None


def incomplete(path: Path, version: CifarVersion, what: str) -> RequestError:
    """The error for files that are missing or cut off."""
    beside = path.parent / version.archive
    remedy = f"get {version.archive} again"
    if beside.is_file() and beside != path:
        remedy = f"remove this folder, so that {beside} is unpacked again"
    return RequestError(f"--data_path={path}", f"{version.title}, is incomplete: {what}", remedy)


def check_folder(folder: Path, version: CifarVersion) -> tuple[str, ...]:
    """Reads every file of the data set once.

    Returns:
        Warnings: a binary file that is cut off between two images can only be told by its smaller number of images.

    Raises:
        RequestError: a file is missing, cut off, or not what it should be.
    """
    loaded = _load_files(folder, version, version.data_files)
    counts = dict(zip(version.train_files, [len(labels) for _, labels in loaded]))
    few, many = min(counts, key=counts.get), max(counts, key=counts.get)
    if counts[few] >= 0.9 * counts[many]:
        return ()
    return (f"{few} has {counts[few]:,} images, {many} has {counts[many]:,}: is it complete?",)


def read_folder(folder: Path, version: CifarVersion, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images `[N, 3, 32, 32]`, uint8, and fine labels `[N]`, int64, of `train` or `val` (the test files).

    Raises:
        RequestError: as `check_folder`.
    """
    files = version.train_files if split == "train" else (version.test_file,)
    images, labels = zip(*_load_files(folder, version, files))
    return np.concatenate(images), np.concatenate(labels)


def read_class_names(folder: Path, version: CifarVersion) -> tuple[str, ...]:
    """Names of the fine classes; their numbers where the folder has no readable list of names."""
    path = folder / version.names_file
    try:
        if version.label_bytes:
            names = path.read_text().split()
        else:
            meta = _load_pickle(path)
            names = [_text(n) for n in meta.get("label_names", meta.get("fine_label_names", ()))]
    except (OSError, ValueError, EOFError, pickle.UnpicklingError):
        names = []
    return tuple(names) if len(names) == version.num_classes else tuple(map(str, range(version.num_classes)))


def _load_files(folder: Path, version: CifarVersion, names: tuple[str, ...]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        smallest = version.published_images(missing[0]) * IMAGE_BYTES
        what = f"{', '.join(missing)} missing: 0 bytes found, over {smallest:,} expected in each"
        raise incomplete(folder, version, what)
    for name in names:
        yield _load_file(folder / name, version)


def _load_file(path: Path, version: CifarVersion) -> tuple[np.ndarray, np.ndarray]:
    """Images `[N, 3, 32, 32]` and labels `[N]` of one file, checked."""
    images, labels = (_load_binary if version.label_bytes else _load_batch)(path, version)
    if len(labels) and not 0 <= labels.min() <= labels.max() < version.num_classes:
        raise _not_cifar(path, f"it has labels from {labels.min()} to {labels.max()}")
    return images.reshape(-1, 3, IMAGE_SIDE, IMAGE_SIDE), labels


def _not_cifar(path: Path, what: str) -> RequestError:
    return RequestError(f"--data_path={path}", f"not a CIFAR file: {what}", "get it again from a source that you trust")


def _cut_off(path: Path, version: CifarVersion) -> RequestError:
    published = version.published_images(path.name) * (IMAGE_BYTES + version.label_bytes)
    what = f"{path.name} is cut off: {path.stat().st_size:,} bytes found, the published file has "
    return incomplete(path.parent, version, what + (f"{published:,}" if version.label_bytes else f"over {published:,}"))


def _load_binary(path: Path, version: CifarVersion) -> tuple[np.ndarray, np.ndarray]:
    record_bytes = version.label_bytes + IMAGE_BYTES
    data = np.fromfile(path, dtype=np.uint8)
    if len(data) == 0 or len(data) % record_bytes:
        raise _cut_off(path, version)
    records = data.reshape(-1, record_bytes)
    return records[:, version.label_bytes :], records[:, version.label_bytes - 1].astype(np.int64)


def _load_batch(path: Path, version: CifarVersion) -> tuple[np.ndarray, np.ndarray]:
    try:
        batch = _load_pickle(path)
    except ForbiddenPickleError as error:
        raise _not_cifar(path, str(error)) from error
    except EOFError as error:
        raise _cut_off(path, version) from error
    except Exception as error:
        # A broken pickle can raise nearly anything: it is a program for a small machine.
        if "truncated" in str(error):
            raise _cut_off(path, version) from error
        raise _not_cifar(path, f"its pickle cannot be read ({type(error).__name__}: {error})") from error
    data = batch.get("data") if isinstance(batch, dict) else None
    labels = batch.get("labels", batch.get("fine_labels")) if isinstance(batch, dict) else None
    if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2 or data.shape[1] != IMAGE_BYTES:
        raise _not_cifar(path, f"no array [N, {IMAGE_BYTES}] of uint8 under the key `data`")
    if not isinstance(labels, list | tuple | np.ndarray) or len(labels) != len(data):
        raise _not_cifar(path, f"no list of {len(data)} labels")
    return data, np.asarray(labels, dtype=np.int64)


class ForbiddenPickleError(pickle.UnpicklingError):
    """A pickle asks for something other than arrays, bytes, strings, numbers and containers."""


def _latin1_bytes(text: str, encoding: str) -> bytes:
    """What Python 3 calls for bytes in a pickle of protocol 2, for the only encoding that it then uses."""
    if encoding != "latin1":
        raise ForbiddenPickleError(f"it holds text in {encoding}")
    return text.encode("latin1")


_ARRAY_PARTS = {
    "_reconstruct": np.ndarray(0).__reduce__()[0],
    "_frombuffer": np.ndarray(0).__reduce_ex__(5)[0],
    "scalar": np.uint8(0).__reduce__()[0],
}
_ALLOWED = {
    ("_codecs", "encode"): _latin1_bytes,
    ("builtins", "bytes"): bytes,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    **{
        # numpy 2 calls its private package _core, numpy 1 and the published files core.
        (f"numpy.{core}.{module}", name): value
        for core in ("core", "_core")
        for module in ("multiarray", "numeric")
        for name, value in _ARRAY_PARTS.items()
    },
}


class _Unpickler(pickle.Unpickler):
    """Builds arrays, bytes, strings, numbers and containers, and calls nothing else that the file names."""

    def find_class(self, module: str, name: str):
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise ForbiddenPickleError(f"it asks for {module}.{name}, which was not run") from None


def _load_pickle(path: Path) -> dict:
    """Reads a pickle of Python 2 or 3; keys of a dict come as strings."""
    with path.open("rb") as file:
        # latin1 is the one encoding in which numpy restores arrays that Python 2 pickled.
        content = _Unpickler(file, encoding="latin1").load()
    return {_text(key): value for key, value in content.items()} if isinstance(content, dict) else content


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
