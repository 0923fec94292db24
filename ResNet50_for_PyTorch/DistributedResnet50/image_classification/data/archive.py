"""CIFAR's published archives: checking and unpacking."""

import fcntl
import gzip
import hashlib
import os
import shutil
import tarfile
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from image_classification.data.cifar import VERSIONS, CifarVersion, incomplete
from mmcls.utils.errors import RequestError

ENDINGS = (".tar.gz", ".tgz")
GZIP_MAGIC = b"\x1f\x8b"
_PARTIAL = ".partial-"
_READ_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError)


def identify(archive: Path) -> CifarVersion:
    """Finds out which version an archive holds, from the first of its files that tells.

    Raises:
        RequestError: it holds no CIFAR files or cannot be read.
    """
    try:
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                for version in VERSIONS:
                    if os.path.basename(member.name) in version.train_files:
                        return version
    except _READ_ERRORS as error:
        _checked_names(archive)
        raise _unreadable(archive, error) from error
    raise RequestError(
        f"--data_path={archive}",
        "this archive holds no CIFAR files",
        f"unpack it and give the folder, or give one of {', '.join(v.archive for v in VERSIONS)}",
    )


def check_archive(archive: Path, version: CifarVersion) -> None:
    """Reads the whole archive, which takes some seconds for a published one.

    Raises:
        RequestError: it is cut off; its checksum differs; a file is missing in it.
    """
    names = _checked_names(archive)
    missing = [name for name in version.data_files if name not in names]
    if missing:
        raise incomplete(archive, version, f"the archive lacks {', '.join(missing)}")


def _checked_names(archive: Path) -> set[str]:
    """The files in an archive, after reading to the end of the compressed stream, where its checksum is."""
    names, tar_error = set(), None
    size = archive.stat().st_size
    try:
        with gzip.open(archive) as stream:
            try:
                with tarfile.open(fileobj=stream, mode="r:") as tar:
                    names = {os.path.basename(member.name) for member in tar if member.isfile()}
            except tarfile.TarError as error:
                # What is wrong with the stream says more, if anything is.
                tar_error = error
            while stream.read(1 << 20):
                pass
    except EOFError as error:
        raise _cut_off(archive, size) from error
    except (zlib.error, gzip.BadGzipFile) as error:
        with archive.open("rb") as file:
            is_gzip = file.read(2) == GZIP_MAGIC
        problem = f"the archive's checksum differs: {error}" if is_gzip else "this is no gzip file"
        raise RequestError(f"--data_path={archive}", problem, "get the archive again") from error
    if size == 0:
        # Python takes an empty file for a complete empty stream.
        raise _cut_off(archive, size)
    if tar_error is not None:
        raise _unreadable(archive, tar_error) from tar_error
    return names


def _cut_off(archive: Path, size: int) -> RequestError:
    published = {v.archive: f", the published file has {v.archive_bytes:,}" for v in VERSIONS}.get(archive.name, "")
    problem = f"the archive is incomplete: {size:,} bytes found{published}"
    return RequestError(f"--data_path={archive}", problem, "get the archive again")


def _unreadable(archive: Path, error: Exception) -> RequestError:
    return RequestError(f"--data_path={archive}", f"cannot be unpacked: {error}", "get the archive again")


def unpacked_folder(archive: Path, version: CifarVersion) -> Path | None:
    """Where an earlier run has unpacked this archive, if one has."""
    for parent in (archive.parent, _cache_folder(archive)):
        if (parent / version.folder).is_dir():
            return parent / version.folder
    return None


def unpack(archive: Path, version: CifarVersion) -> tuple[Path, bool]:
    """Unpacks the archive beside itself, or into the user's cache where that is not allowed.

    The files appear under their folder's name all at once. Processes that call this at the same time wait for the
    first one and take its result; where the file system has no locks each unpacks and all but one give way.

    Returns:
        The folder, and whether this call has unpacked it.

    Raises:
        RequestError: neither place can be written, or the archive cannot be read.
    """
    parent = archive.parent if os.access(archive.parent, os.W_OK) else _cache_folder(archive)
    try:
        parent.mkdir(parents=True, exist_ok=True)
        with _folder_lock(parent) as alone:
            found = unpacked_folder(archive, version)
            if found is not None:
                return found, False
            if alone:
                for remains in parent.glob(f".{version.folder}{_PARTIAL}*"):
                    shutil.rmtree(remains)
            return parent / version.folder, _unpack_into(parent / version.folder, archive, version)
    except _READ_ERRORS as error:
        raise _unreadable(archive, error) from error
    except OSError as error:
        raise RequestError(
            f"--data_path={archive}",
            f"cannot unpack into {parent}: {error.strerror or error}",
            "make room or unpack it by hand, and give the folder",
        ) from error


def _unpack_into(folder: Path, archive: Path, version: CifarVersion) -> bool:
    """Returns False where another process was faster."""
    partial = folder.with_name(f".{folder.name}{_PARTIAL}{uuid.uuid4().hex}")
    partial.mkdir()
    try:
        wanted = {*version.data_files, version.names_file}
        with tarfile.open(archive, "r:gz") as tar:
            for member in tar:
                name = os.path.basename(member.name)
                # By name, into a folder of our own: whatever else and wherever else the archive wants to write.
                if member.isfile() and name in wanted:
                    with tar.extractfile(member) as source, (partial / name).open("wb") as target:
                        shutil.copyfileobj(source, target)
        try:
            partial.rename(folder)
        except OSError:
            if folder.is_dir():
                return False
            raise
        return True
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _cache_folder(archive: Path) -> Path:
    """A folder of its own in the user's cache for each archive, by path, size and time of change."""
    stat = archive.stat()
    key = f"{archive}\0{stat.st_size}\0{stat.st_mtime_ns}"
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "image_classification" / hashlib.sha256(os.fsencode(key)).hexdigest()[:16]


@contextmanager
def _folder_lock(folder: Path) -> Iterator[bool]:
    """Holds an exclusive lock on a folder; yields False where its file system cannot lock.

    The lock is on the folder itself, so nothing is left behind, and ends with the process.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            locked = True
        except OSError:
            locked = False
        yield locked
    finally:
        os.close(descriptor)
