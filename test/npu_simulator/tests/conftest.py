"""Runs checks on the simulated NPU in processes of their own; pytest's own process never imports the simulator."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = Path(__file__).parent / "checks"
SIMULATOR = Path(__file__).parent.parent
OURS = ("NPU_SIMULATOR_", "HCCL_", "ASCEND_")  # variables that would change what is checked


def _environment(**changes):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OURS)}
    if "NPU_SIMULATOR_CACHE" in os.environ:
        kept["NPU_SIMULATOR_CACHE"] = os.environ["NPU_SIMULATOR_CACHE"]
    return {**kept, "PYTHONPATH": str(SIMULATOR), "OMP_NUM_THREADS": "2", **changes}


def _free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def compiled():
    """Compiles the simulator where that has not been done, so that no test's time limit has to allow for it."""
    command = [sys.executable, "-c", "import torch_npu"]
    subprocess.run(command, cwd="/", env=_environment(), check=True, timeout=600)


@pytest.fixture
def python(tmp_path, compiled):
    """Runs Python with the simulator on its path, in an empty folder; gives the finished process."""

    def run(*arguments, timeout=120, **environment):
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(
            command, cwd=tmp_path, env=_environment(**environment), capture_output=True, text=True, timeout=timeout
        )

    return run


@pytest.fixture
def ranks(tmp_path, compiled):
    """Runs the same Python command as several ranks; gives one (exit status, output) for each."""

    def run(*arguments, world_size=2, timeout=240, **environment):
        shared = dict(WORLD_SIZE=str(world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))
        shared["OMP_NUM_THREADS"] = "1"
        processes = [
            subprocess.Popen(
                [sys.executable, *map(str, arguments)],
                cwd=tmp_path,
                env=_environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank), **environment),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(world_size)
        ]
        try:
            return [(process.communicate(timeout=timeout)[0], process.returncode) for process in processes]
        finally:
            for process in processes:
                process.kill()

    return run


def arguments_for(name):
    """Arguments for Python that run the file of checks `name` with pytest, apart from the project's settings."""
    plain = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(CHECKS)]
    return ["-m", "pytest", *plain, str(CHECKS / name)]


@pytest.fixture
def check_file(python):
    """Runs a file of checks in one process and fails with its report."""

    def check(name, timeout=240, **environment):
        process = python(*arguments_for(name), timeout=timeout, **environment)
        assert process.returncode == 0, process.stdout + process.stderr

    return check


@pytest.fixture
def check_file_on_ranks(ranks):
    """Runs a file of checks as several ranks of one job and fails with the report of the first that fails."""

    def check(name, **environment):
        for report, status in ranks(*arguments_for(name), **environment):
            assert status == 0, report

    return check
