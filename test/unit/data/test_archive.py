"""Unpacking the published archives: whole, once, and leaving nothing else behind."""

import os
from concurrent.futures import ThreadPoolExecutor

import pytest

from image_classification.config import DataConfig
from image_classification.data import archive, detect_layout, open_datasets, prepare_data
from mmcls.utils.errors import RequestError


def problem_with(path) -> str:
    with pytest.raises(RequestError) as caught:
        detect_layout(str(path))
    return str(caught.value)


def names(folder) -> list[str]:
    return sorted(os.listdir(folder))


@pytest.mark.parametrize("given", ["archive", "parent"])
def test_unpacks_beside_the_archive_and_reuses_it(tmp_path, make, given):
    packed = make.archive(tmp_path / "data")
    path = packed if given == "archive" else packed.parent
    found = detect_layout(str(path))
    assert (found.kind, found.path) == ("cifar10", packed)
    ready = prepare_data(found)
    folder = packed.parent / "cifar-10-batches-py"
    assert ready.path == folder and ready.description.endswith(f"(unpacked now from {packed})")
    assert names(packed.parent) == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]
    assert len(open_datasets(ready, DataConfig(), 32).train) == 30
    again = detect_layout(str(packed))
    assert again.path == folder and again.description.endswith(f"(unpacked before from {packed})")
    assert prepare_data(again) is again


def test_archive_of_cifar_100_binary_under_another_name(tmp_path, make):
    packed = make.archive(tmp_path / "data", name="mine.tgz", num_classes=100, version="binary")
    assert prepare_data(detect_layout(str(packed))).description.startswith("CIFAR-100, binary version, in ")


def test_one_of_several_at_once_unpacks(tmp_path, make):
    found = detect_layout(str(make.archive(tmp_path / "data")))
    with ThreadPoolExecutor(8) as pool:
        ready = list(pool.map(prepare_data, [found] * 8))
    assert sum("unpacked now" in layout.description for layout in ready) == 1
    assert len({layout.path for layout in ready}) == 1


def test_without_locks_one_wins_and_nothing_is_left(tmp_path, make, monkeypatch):
    def no_locks(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(archive.fcntl, "flock", no_locks)
    found = detect_layout(str(make.archive(tmp_path / "data")))
    with ThreadPoolExecutor(8) as pool:
        ready = list(pool.map(prepare_data, [found] * 8))
    assert sum("unpacked now" in layout.description for layout in ready) == 1
    assert names(tmp_path / "data") == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]


def test_remains_of_a_killed_process_are_removed(tmp_path, make):
    packed = make.archive(tmp_path / "data")
    remains = packed.parent / ".cifar-10-batches-py.partial-0123"
    remains.mkdir()
    (remains / "data_batch_1").write_bytes(b"half")
    prepare_data(detect_layout(str(packed)))
    assert names(packed.parent) == ["cifar-10-batches-py", "cifar-10-python.tar.gz"]


def test_unpacks_into_the_cache_where_the_data_are_read_only(tmp_path, make, monkeypatch):
    packed = make.archive(tmp_path / "data")
    monkeypatch.setattr(archive.os, "access", lambda path, mode: path != packed.parent)
    ready = prepare_data(detect_layout(str(packed)))
    assert tmp_path / "cache" / "image_classification" in ready.path.parents
    assert names(packed.parent) == ["cifar-10-python.tar.gz"]
    assert detect_layout(str(packed)).path == ready.path


def test_failing_disk_leaves_nothing(tmp_path, make, monkeypatch):
    found = detect_layout(str(make.archive(tmp_path / "data")))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(archive.shutil, "copyfileobj", full)
    with pytest.raises(RequestError, match="cannot unpack into .*: No space left on device; make room"):
        prepare_data(found)
    assert names(tmp_path / "data") == ["cifar-10-python.tar.gz"]


def test_members_cannot_leave_the_folder(tmp_path, make):
    folder = make.cifar(tmp_path / "source")
    packed = tmp_path / "data" / "cifar-10-python.tar.gz"
    packed.parent.mkdir()
    with archive.tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, "../../cifar-10-batches-py")
        tar.add(folder / "test_batch", "cifar-10-batches-py/run_me.sh")
    ready = prepare_data(detect_layout(str(packed)))
    assert ready.path.parent == packed.parent and "run_me.sh" not in names(ready.path)
    assert names(tmp_path) == ["data", "source"]


@pytest.mark.parametrize("share", [0, 0.001, 0.5, 0.999])
def test_cut_off_archive(tmp_path, make, share):
    packed = make.archive(tmp_path / "data")
    content = packed.read_bytes()[: int(packed.stat().st_size * share)]
    packed.write_bytes(content)
    expected = f"the archive is incomplete: {len(content):,} bytes found, the published file has 170,498,071; "
    for path in (packed, packed.parent):
        assert problem_with(path).startswith(f"--data_path={packed}: {expected}")


@pytest.mark.parametrize("place", [0.5, -6])
def test_damaged_archive(tmp_path, make, place):
    packed = make.archive(tmp_path / "data")
    content = bytearray(packed.read_bytes())
    content[int(len(content) * place) if isinstance(place, float) else place] ^= 255
    packed.write_bytes(content)
    assert f"--data_path={packed}: the archive's checksum differs: " in problem_with(packed)


def test_web_page_saved_as_archive(tmp_path, make):
    packed = make.archive(tmp_path / "data")
    packed.write_bytes(b"<html>404</html>")
    assert "this is no gzip file" in problem_with(packed)


def test_archive_of_something_else(tmp_path, make):
    make.image(tmp_path / "a.jpg")
    packed = tmp_path / "photos.tar.gz"
    with archive.tarfile.open(packed, "w:gz") as tar:
        tar.add(tmp_path / "a.jpg", "a.jpg")
    assert "this archive holds no CIFAR files; unpack it" in problem_with(packed)


def test_archive_that_lacks_a_file(tmp_path, make):
    folder = make.cifar(tmp_path / "source")
    (folder / "data_batch_3").unlink()
    packed = tmp_path / "cifar-10-python.tar.gz"
    with archive.tarfile.open(packed, "w:gz") as tar:
        tar.add(folder, folder.name)
    assert "is incomplete: the archive lacks data_batch_3" in problem_with(packed)
