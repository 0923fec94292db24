"""A copy of the launchers under a path that is hard to quote, and interpreters that record how they were called."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
RECORDER = r"""#!/usr/bin/env bash
printf '%s\0' "$0" "$@" >"$RECORD"
exit "${FAKE_STATUS:-0}"
"""
DROPPED = (
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
    "CONDA_DEFAULT_ENV",
    "ASCEND_OPP_PATH",
    "ASCEND_TOOLKIT_HOME",
    "ASCEND_HOME_PATH",
    "PIP_CONSTRAINT",
    "PIP_BUILD_CONSTRAINT",
)


class Copy:
    """A copy of the repository's scripts.

    Args:
        root: where the copy is made.
        record: the file that recording interpreters write.
    """

    def __init__(self, root: Path, record: Path):
        self.root, self.record = root, record
        self.test, self.venv = root / "test", root / ".venv"
        self.program = root / "ResNet50_for_PyTorch" / "pytorch_resnet50_apex.py"
        self.test.mkdir(parents=True)
        for script in [*REPOSITORY.glob("test/*.sh"), REPOSITORY / "test" / "setup_environment.py"]:
            shutil.copy(script, self.test)
        self.program.parent.mkdir()
        (self.program.parent / "test").symlink_to("../test")
        (root / "requirements.txt").write_text("pytest>=1  # satisfied by whoever runs this\n")
        for name in ("pyproject.toml", "requirements-npu.txt"):
            shutil.copy(REPOSITORY / name, root)

    @staticmethod
    def write_executable(path: Path, text: str = RECORDER) -> Path:
        """Writes a script with its folders; a recording interpreter unless another text is given."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def environment(self, **variables: str | Path) -> dict[str, str]:
        """The environment of a call: no active Python environment, no CANN and no network, but for `variables`."""
        kept = {name: value for name, value in os.environ.items() if name not in DROPPED}
        extra = {name: str(value) for name, value in variables.items()}
        return kept | {"PIP_NO_INDEX": "1", "RECORD": str(self.record)} | extra

    def run(self, script: Path | str, *flags: str, cwd: Path | str = "/", **variables: str | Path):
        """Runs a script of the copy with bash; returns the completed process with its text output."""
        command = ["bash", str(script), *flags]
        environment = self.environment(**variables)
        return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=60)

    def recorded(self) -> list[str]:
        """The call of a recording interpreter: its own path, then its arguments."""
        return self.record.read_text().split("\0")[:-1]


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path / "it's a copy – ü $HOME" / "repo", tmp_path / "record")


@pytest.fixture
def recorder(copy: Copy, tmp_path: Path) -> Path:
    """An environment whose interpreter records its call."""
    return copy.write_executable(tmp_path / "an env" / "bin" / "python").parent.parent
