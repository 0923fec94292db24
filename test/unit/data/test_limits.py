"""Shared memory and file handles: the need, what there is, and failures in plain words."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from image_classification.config import DataConfig
from image_classification.data import check_loaders, detect_layout, limits, open_datasets
from image_classification.data.limits import check_limits, explain_loader_failure
from mmcls.utils import errors
from mmcls.utils.errors import RequestError

MEGABYTE = 10**6
PACKAGES = [str(Path(limits.__file__).parents[2]), str(Path(errors.__file__).parents[2])]


@pytest.fixture
def machine(monkeypatch):
    """Pretends free bytes of shared memory and the limits of open files."""

    def pretend(free=10**12, soft=10**6, hard=10**6, open_handles=20):
        blocks = SimpleNamespace(f_bavail=free // 4096, f_blocks=free // 4096, f_frsize=4096)
        monkeypatch.setattr(limits.os, "statvfs", lambda path: blocks)
        monkeypatch.setattr(limits.resource, "getrlimit", lambda which: (soft, hard))
        monkeypatch.setattr(limits, "_open_handles", lambda: open_handles)

    return pretend


def test_enough_says_nothing(machine):
    machine()
    assert check_limits(8, 40 * MEGABYTE, 8) == ()


def test_too_little_shared_memory_is_one_line_with_numbers_and_remedy(machine):
    machine(free=64 * MEGABYTE)
    with pytest.raises(RequestError) as caught:
        check_limits(8, 40 * MEGABYTE, 2)
    line = str(caught.value)
    assert line.startswith("--workers=8: /dev/shm has 64.0 MB free, 68 batches of 40.0 MB for 2 ranks with 8 loader")
    assert "take 2,720.0 MB; start the container with docker --shm-size=6g, or fewer --workers (0 needs none)" in line
    assert "\n" not in line


def test_tight_shared_memory_is_a_warning(machine):
    machine(free=800 * MEGABYTE)
    (line,) = check_limits(4, 40 * MEGABYTE, 1)
    assert line.startswith("warning: /dev/shm has 800.0 MB free, 18 batches of 40.0 MB for 4 loader processes take")
    assert "docker --shm-size=2g" in line


@pytest.mark.parametrize("hard, remedy", [(4096, "`ulimit -n 180`"), (64, "administrator")])
def test_too_few_file_handles(machine, hard, remedy):
    machine(soft=64, hard=hard)
    with pytest.raises(RequestError) as caught:
        check_limits(8, MEGABYTE, 1)
    assert str(caught.value).startswith("--workers=8: `ulimit -n` allows 64 open files, a rank needs 180; ")
    assert remedy in str(caught.value)


def test_without_processes_nothing_is_needed(machine):
    machine(free=0, soft=1)
    assert check_limits(0, 40 * MEGABYTE, 8) == ()


def test_without_shared_memory_folder_it_is_not_checked(machine, monkeypatch, tmp_path):
    machine(free=0)
    monkeypatch.setattr(limits, "SHARED_MEMORY", tmp_path / "none")
    assert check_limits(2, MEGABYTE, 1) == ()


def test_need_of_a_data_set(machine, tmp_path, make):
    """Files need it, small files that are decoded once need little, images in memory need none."""
    machine(free=3 * MEGABYTE)
    big = open_datasets(detect_layout(str(make.folder(tmp_path / "big", size=(120, 110)))), DataConfig(), 224).train
    small = open_datasets(detect_layout(str(make.folder(tmp_path / "small", size=(20, 20)))), DataConfig(), 20).train
    config = DataConfig(workers=2, batch_size=256)
    with pytest.raises(RequestError, match="10 batches of 38.5 MB"):
        check_loaders(big, config, 1)
    assert check_loaders(small, config, 1) == ()
    with pytest.raises(RequestError, match="10 batches of 614 kB"):
        check_loaders(small, DataConfig(workers=2, batch_size=512, resident="off"), 1)
    digits = open_datasets(detect_layout("digits"), DataConfig(), 8).train
    assert check_loaders(digits, DataConfig(workers=8, batch_size=10**6), 8) == ()


@pytest.mark.parametrize(
    "text, parts",
    [
        ("DataLoader worker (pid 42) is killed by signal: Killed. ", ("process 42", "SIGKILL", "memory ran out")),
        (
            "DataLoader worker (pid 42) is killed by signal: Bus error. It is possible that dataloader's workers ...",
            ("process 42", "SIGBUS", "--shm-size"),
        ),
        ("DataLoader worker (pid(s) 42, 43) exited unexpectedly", ("process 42, 43", "ended by itself")),
        ("DataLoader worker (pid 42) is killed by signal: Segmentation fault. ", ("SIGSEGV", "--workers=0")),
        (
            "Caught RuntimeError ...\n...\nRuntimeError: unable to allocate shared memory(shm) for file </torch_1>",
            ("no room", "--shm-size"),
        ),
        ("Too many open files. Communication with the workers is no longer possible.", ("ulimit -n",)),
    ],
)
def test_torchs_messages_in_plain_words(text, parts):
    line = explain_loader_failure(text)
    assert all(part in line for part in parts) and "\n" not in line


def test_other_messages_are_left_alone():
    assert explain_loader_failure("CUDA out of memory") is None


def mounts_allowed() -> bool:
    command = ["unshare", "-rm", "sh", "-c", "mount -t tmpfs -o size=1m x /dev/shm"]
    return (
        shutil.which("unshare") is not None
        and subprocess.run(command, check=False, capture_output=True).returncode == 0
    )


PROGRAM = """
import sys, torch
sys.path[:0] = {paths!r}
from image_classification.config import DataConfig
from image_classification.data import TrainLoader, limits
from test_loader_prefetch import Files
batch = int(sys.argv[2])
if sys.argv[1] == "checked":
    print("warnings", len(limits.check_limits(2, batch * 48, 1)))
loader = TrainLoader(
    Files(12 * batch), DataConfig(workers=2, data_timeout=60), micro_batch_size=batch, micro_batches_per_epoch=12,
    rank=0, world_size=1, seed=0, device=torch.device("cpu"), memory_format=torch.channels_last,
)
try:
    print("batches", len(list(loader.epoch(0))))
finally:
    loader.close()
"""


@pytest.mark.skipif(not mounts_allowed(), reason="this user may not mount a small /dev/shm")
@pytest.mark.parametrize(
    "how, batch, status, words",
    [
        ("checked", 5000, 0, "batches 12"),
        ("checked", 16_000, 1, "RequestError: --workers=2: /dev/shm has 4.2 MB free, 10 batches of 768 kB"),
        (
            "unchecked",
            60_000,
            1,
            "LoaderError: no room for the batches of loader processes: the shared memory /dev/shm is full",
        ),
    ],
)
def test_a_small_shared_memory(how, batch, status, words):
    """What passes the check works, and without the check a lack of memory is an error and no hang."""
    program = PROGRAM.format(paths=[*PACKAGES, str(Path(__file__).parent)])
    inner = 'mount -t tmpfs -o size=4m x /dev/shm && exec "$@"'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inner, "sh", sys.executable, "-c", program, how, str(batch)],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, check=False, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    assert words in done.stdout + done.stderr
