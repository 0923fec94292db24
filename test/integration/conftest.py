"""Small data, small networks and ways to start the program."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from image_classification.resnet import build_resnet

REPOSITORY = Path(__file__).resolve().parents[2]
PROGRAM = REPOSITORY / "ResNet50_for_PyTorch" / "pytorch_resnet50_apex.py"
TINY = ("--arch=resnet18", "--width_multiplier=0.125", "--device=cpu")
CLASSES = ("n01440764", "n01443537", "n02102040")
VAL_COUNTS = (4, 3, 3)


def environment(**variables: str) -> dict[str, str]:
    """This process's environment with one thread a rank and nothing of a running job in it."""
    job = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {k: v for k, v in os.environ.items() if k not in job} | {"OMP_NUM_THREADS": "1"} | variables


class Started:
    """A program in a process group of its own, whose output goes into files."""

    def __init__(self, command: list[str], folder: Path, env: dict[str, str]):
        folder.mkdir(parents=True, exist_ok=True)
        self.out, self.err = folder / "stdout", folder / "stderr"
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=env, cwd=folder, start_new_session=True
            )

    def wait_for(self, text: str, seconds: float = 120) -> None:
        end = time.monotonic() + seconds
        while text not in self.out.read_text():
            assert self.process.poll() is None, self.err.read_text()
            assert time.monotonic() < end, f"{text!r} not in {self.out.read_text()}"
            time.sleep(0.1)

    def members(self) -> list[int]:
        """Processes of the group that are alive, the launcher's and the ranks'."""
        found = []
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                fields = stat.read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[2]) == self.process.pid and fields[0] != "Z":
                found.append(int(stat.parent.name))
        return found

    def ranks(self) -> list[int]:
        """Process ids of the ranks by rank, found by the environment that each was given."""
        ranks = {}
        for pid in self.members():
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if b"spawn_main" in command:
                ranks[pid] = pid
        return sorted(ranks)

    def wait_until_gone(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self.members():
            assert time.monotonic() < end, f"still there: {self.members()}"
            self.process.poll()
            time.sleep(0.1)

    def end(self) -> None:
        if self.members():
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


@pytest.fixture
def start(tmp_path):
    """Starts the program in the background; what is still there at the end of the test is killed."""
    started = []

    def start_program(
        *arguments: str, name: str = "run", command: list[str] | None = None, **variables: str
    ) -> Started:
        command = command or [sys.executable, str(PROGRAM)]
        started.append(Started([*command, *arguments], tmp_path / name, environment(**variables)))
        return started[-1]

    yield start_program
    for program in started:
        program.end()


@pytest.fixture
def run(start):
    """Runs the program to its end and returns it with its exit status in `status`."""

    def run_program(*arguments: str, seconds: float = 300, **options) -> Started:
        program = start(*arguments, **options)
        program.status = program.process.wait(seconds)
        return program

    return run_program


@pytest.fixture(scope="session")
def pictures(tmp_path_factory) -> Path:
    """24 training and 4 + 3 + 3 validation JPEGs of three classes, 48 x 40 pixels."""
    root, rng = tmp_path_factory.mktemp("my pictures"), np.random.default_rng(0)
    for split, counts in (("train", (8, 8, 8)), ("val", VAL_COUNTS)):
        for name, count in zip(CLASSES, counts, strict=True):
            folder = root / split / name
            folder.mkdir(parents=True)
            for number in range(count):
                pixels = rng.integers(0, 256, (48, 40, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{name}_{number}.JPEG")
    return root


@pytest.fixture(scope="session")
def constant_weights(tmp_path_factory) -> Path:
    """Weights that always answer class 0: right in 4 of the 10 validation pictures, 40.000 %."""
    model = build_resnet("resnet18", len(CLASSES), stem="cifar", width_multiplier=0.125)
    weights = model.state_dict() | {
        "fc.weight": torch.zeros_like(model.fc.weight),
        "fc.bias": torch.tensor([1.0, 0, 0]),
    }
    path = tmp_path_factory.mktemp("weights") / "constant.pth"
    torch.save(weights, path)
    return path


@pytest.fixture
def run_folders(tmp_path):
    """Finds the run folders below an --output_dir, oldest first."""

    def find(output_dir: Path) -> list[Path]:
        return sorted(output_dir.glob("*/*"), key=lambda folder: folder.stat().st_ctime)

    return find
