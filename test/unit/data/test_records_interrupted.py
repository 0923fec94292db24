"""Packing that is stopped at some moment, and the commands around it."""

import fcntl
import os
import resource
import signal
import subprocess
import sys
import time
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_classification.config import DataConfig
from image_classification.data import detect_layout, open_datasets
from image_classification.data.records import pack as pack_module
from image_classification.data.records.__main__ import main
from image_classification.data.records.manifest import StoreOptions, read_manifest
from image_classification.data.records.pack import pack
from mmcls.utils.errors import RequestError

REPOSITORY = Path(__file__).resolve().parents[3]
SMALL_SHARDS = StoreOptions(shard_bytes=8_000)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture
def source(tmp_path, make):
    return make.folder(tmp_path / "source")


@pytest.fixture
def expected(tmp_path, source):
    """What an uninterrupted pack makes."""
    pack(str(source), str(tmp_path / "whole"), SMALL_SHARDS, workers=1)
    return contents(tmp_path / "whole")


def stop_after(monkeypatch, pictures, how):
    """Calls `how` when so many pictures have been packed."""
    counted = iter(range(10**6))
    whole = pack_module.stored_bytes

    def stored_bytes(data, options):
        if next(counted) == pictures:
            how()
        return whole(data, options)

    monkeypatch.setattr(pack_module, "stored_bytes", stored_bytes)


def kill_self():
    os.kill(os.getpid(), signal.SIGKILL)


def interrupt():
    raise KeyboardInterrupt


@pytest.mark.parametrize("pictures", [0, 1, 4, 13, 33])
def test_killed_in_mid_shard_and_continued(tmp_path, source, expected, monkeypatch, pictures):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, pictures, kill_self)
        process = get_context("fork").Process(
            target=pack, args=(str(source), str(out), SMALL_SHARDS), kwargs={"workers": 1}
        )
        process.start()
        process.join(60)
    assert process.exitcode == -signal.SIGKILL
    with pytest.raises(RequestError, match="packing it has not finished; give the same pack command again"):
        detect_layout(str(out))
    finished = {path.name: path.stat().st_mtime_ns for path in out.glob("*.arrow")}
    assert len(finished) == {0: 0, 1: 0, 4: 1, 13: 3, 33: 8}[pictures]
    pack(str(source), str(out), SMALL_SHARDS, workers=1)
    assert contents(out) == expected
    assert finished == {name: (out / name).stat().st_mtime_ns for name in finished}


def test_interrupted_several_times(tmp_path, source, expected, monkeypatch):
    out = tmp_path / "out"
    for _ in range(3):
        with monkeypatch.context() as patch:
            stop_after(patch, 6, interrupt)
            with pytest.raises(KeyboardInterrupt):
                pack(str(source), str(out), SMALL_SHARDS, workers=1)
    assert len(list(out.glob("*.arrow"))) >= 3
    pack(str(source), str(out), SMALL_SHARDS, workers=1)
    assert contents(out) == expected


def test_full_disk(tmp_path, source, expected):
    out, limits = tmp_path / "out", resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (5_000, limits[1]))
        with pytest.raises(
            RequestError, match=r"cannot write train-00000.arrow: File too large; give the same command"
        ):
            pack(str(source), str(out), SMALL_SHARDS, workers=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(out.rglob("*.arrow"))
    pack(str(source), str(out), SMALL_SHARDS, workers=1)
    assert contents(out) == expected


def test_a_disk_that_is_too_small_is_found_before(tmp_path, source, monkeypatch):
    monkeypatch.setattr(pack_module.shutil, "disk_usage", lambda path: SimpleNamespace(free=100))
    with pytest.raises(RequestError, match=r"needs about 0.0 GiB more, the disk has 0.0 GiB free"):
        pack(str(source), str(tmp_path / "out"), SMALL_SHARDS, workers=1)


def test_an_unfinished_pack_is_continued_with_its_options_and_pictures_only(tmp_path, source, monkeypatch, make):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 6, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pack(str(source), str(out), SMALL_SHARDS, workers=1)
    with pytest.raises(RequestError, match="an unfinished pack of other options"):
        pack(str(source), str(out), StoreOptions(resize_short=20, shard_bytes=8_000), workers=1)
    make.image(source / "train/bee/new.jpg")
    with pytest.raises(RequestError, match="an unfinished pack of another list of pictures"):
        pack(str(source), str(out), SMALL_SHARDS, workers=1)


def test_finished_records_are_not_packed_over(tmp_path, source, make):
    out = tmp_path / "out"
    pack(str(source), str(out), SMALL_SHARDS, workers=1)
    with pytest.raises(RequestError, match="holds records packed with other options"):
        pack(str(source), str(out), StoreOptions(), workers=1)
    make.image(source / "train/bee/new.jpg")
    with pytest.raises(RequestError, match="holds records packed from another list of pictures"):
        pack(str(source), str(out), SMALL_SHARDS, workers=1)


def test_folders_that_cannot_be_packed_into(tmp_path, source):
    with pytest.raises(RequestError, match="lies among the pictures"):
        pack(str(source), str(source / "train/records"), SMALL_SHARDS, workers=1)
    with pytest.raises(RequestError, match="is not empty: train, val"):
        pack(str(source), str(source), SMALL_SHARDS, workers=1)
    assert sorted(os.listdir(source)) == ["train", "val"]
    (tmp_path / "file").touch()
    with pytest.raises(RequestError, match="cannot be made"):
        pack(str(source), str(tmp_path / "file/out"), SMALL_SHARDS, workers=1)


def test_two_packs_at_once(tmp_path, source):
    (tmp_path / "out/unfinished").mkdir(parents=True)
    with (tmp_path / "out/unfinished/lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RequestError, match="is being packed by another process"):
            pack(str(source), str(tmp_path / "out"), SMALL_SHARDS, workers=1)
    pack(str(source), str(tmp_path / "out"), SMALL_SHARDS, workers=1)


# The command line


def run(*arguments):
    return main([str(argument) for argument in arguments])


def test_commands(tmp_path, source, capsys):
    out = tmp_path / "out"
    assert (
        run("pack", f"--data-path={source}", "--out", out, "--shard_bytes=8kB", "--resize-short=32", "--workers=1") == 0
    )
    shown = capsys.readouterr().out
    assert "3 classes, short side 32 pixels at most, JPEG quality 90" in shown
    assert "train: 24 images, 8 to 8 a class" in shown and "val: 10 images, 3 to 4 a class" in shown
    assert run("info", f"--data_path={out}") == 0
    assert capsys.readouterr().out == shown
    assert run("verify", f"--data_path={out}", "--workers=1") == 0
    assert "34 images" in capsys.readouterr().out
    assert read_manifest(out).options == StoreOptions(resize_short=32, shard_bytes=8_000)
    assert open_datasets(detect_layout(str(out)), DataConfig(), 32).train.pixels(0).shape == (38, 32, 3)


@pytest.mark.parametrize(
    "arguments, line",
    [
        ([], "records: the following arguments are required: pack|verify|info"),
        (["pack", "--data_path=x"], "records pack: the following arguments are required: --out"),
        (["pack", "--data_path=digits", "--out=x"], "--data_path=digits: digits of scikit-learn: is read into memory"),
        (["pack", "--data_path=x", "--out=x", "--shard_bytes=1XB"], "1XB is not a size"),
        (["pack", "--data_path=x", "--out=x", "--quality=0"], "0 is not a whole number from 1 to 100"),
        (["pack", "--data_path=x", "--out=x", "--workers=two"], "two is not a whole number above 0"),
        (["pack", "--data_path=x", "--out=x", "--resize_short=9", "--max_side=9"], "not allowed with"),
        (["pack", "--data_path=x", "--out=x", "--colour"], "unrecognized arguments: --colour"),
        (["info", "--data_path=/no/such"], "--data_path=/no/such: holds no manifest.json"),
    ],
)
def test_wrong_requests_are_one_line(arguments, line, capsys):
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and line in shown.err
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1


def test_verify_names_what_is_damaged(tmp_path, source, capsys):
    out = tmp_path / "out"
    manifest = pack(str(source), str(out), SMALL_SHARDS, workers=1)
    first, second = (out / shard.file for shard in (manifest.train.shards[1], manifest.val.shards[0]))
    train = open_datasets(detect_layout(str(out)), DataConfig(), 32).train
    content = bytearray(first.read_bytes())
    content[content.index(train.encoded(manifest.train.shards[0].images)) + 300] ^= 1
    first.write_bytes(content)
    content = bytearray(second.read_bytes())
    content[-20:] = bytes(20)
    second.write_bytes(content)
    assert run("verify", f"--data_path={out}", "--workers=1") == 2
    shown = capsys.readouterr()
    assert f"{first}: its SHA-256 is not that of the manifest" in shown.out
    assert f"{first}, record 0: damaged: wrong checksum" in shown.out
    assert f"{second}: damaged: " in shown.out
    last = shown.err.splitlines()[-1]
    assert last.startswith(f"error: --data_path={out}: 2 of ") and f"{first.name}, {second.name}; copy" in last


def test_verify_compares_the_index(tmp_path, source, capsys):
    out = tmp_path / "out"
    pack(str(source), str(out), SMALL_SHARDS, workers=1)
    content = bytearray((out / "val.index.npy").read_bytes())
    content[-1] ^= 1
    (out / "val.index.npy").write_bytes(content)
    assert run("verify", f"--data_path={out}", "--workers=1") == 2
    assert "val.index.npy: its SHA-256 is not that of the manifest" in capsys.readouterr().err


def test_verify_decodes(tmp_path, source, capsys, monkeypatch):
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        # A pack that stores half of each file, and says that all is well.
        patch.setattr(pack_module, "stored_bytes", lambda data, options: data[: len(data) // 2])
        pack(str(source), str(out), SMALL_SHARDS, workers=1)
    assert run("verify", f"--data_path={out}", "--workers=1") == 2
    shown = capsys.readouterr()
    assert "record 0: truncated" in shown.out and "SHA-256" not in shown.out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_signal_leaves_no_process_behind_and_the_same_command_continues(tmp_path, make, number):
    make.image(tmp_path / "big.jpg", size=(900, 800))
    for split, count in (("train", 40), ("val", 1)):
        (tmp_path / "source" / split / "ant").mkdir(parents=True)
        for i in range(count):
            (tmp_path / "source" / split / f"ant/{i}.jpg").symlink_to(tmp_path / "big.jpg")
    out = tmp_path / "out"
    roots = (REPOSITORY, REPOSITORY / "ResNet50_for_PyTorch/DistributedResnet50")
    command = [sys.executable, "-m", "image_classification.data.records", "pack", f"--data_path={tmp_path / 'source'}", f"--out={out}"]  # fmt: skip
    process = subprocess.Popen(
        [*command, "--workers=2", "--shard_bytes=20MB", "--resize_short=600"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, roots))},
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    deadline = time.monotonic() + 120
    while not list(out.glob("unfinished/*.arrow")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    # As a terminal does: Ctrl-C goes to all of them.
    (os.killpg if number == signal.SIGINT else os.kill)(process.pid, number)
    error = process.communicate(timeout=60)[1]
    if number == signal.SIGKILL:
        assert process.returncode == -number
    else:
        assert process.returncode == 128 + number
        assert error == f"error: stopped by {number.name}; give the same command again to continue\n"
    while _alive(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(process.pid)
    assert not (out / "manifest.json").exists()
    options = StoreOptions(resize_short=600, shard_bytes=20_000_000)
    assert pack(str(tmp_path / "source"), str(out), options, workers=1).train.images == 40


def _alive(group):
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    return True
