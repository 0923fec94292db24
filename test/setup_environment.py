"""Sets up what requirements.txt asks for, for quickstart.sh and run_tests.sh, and prints the interpreter that has it.

An interpreter that satisfies requirements.txt is used as it is. Otherwise `.venv` in the repository is made or
completed: requirements.txt, the repository itself (editable), mmcv. A second call finds a stamp and ends at once, an
interrupted one is continued by the next, and of two calls one waits. `--mmcv` installs nothing but mmcv, and `--npu`
all of requirements-npu.txt, into the interpreter that runs this. Only the path goes to stdout. Needs Python 3.10 and
nothing else.
"""

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
REQUIREMENTS = REPOSITORY / "requirements.txt"
NPU_REQUIREMENTS = REPOSITORY / "requirements-npu.txt"
VENV = REPOSITORY / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "set-up-complete"
MMCV_REMEDY = "take Python 3.10 to 3.12, or see what `.venv/bin/python test/setup_environment.py --mmcv` prints"


class SetupError(Exception):
    """The environment cannot be set up.

    Args:
        subject: what is in the way.
        problem: what is wrong with it.
        remedy: what to change.
        exit_status: 2 where the machine lacks something, 1 where a step failed.
    """

    def __init__(self, subject: str, problem: str, remedy: str, exit_status: int = 2):
        super().__init__(f"{subject}: {problem}; {remedy}")
        self.exit_status = exit_status


def say(text: str) -> None:
    print(f"set-up: {text}", file=sys.stderr, flush=True)


def requirement_lines(text: str) -> list[str]:
    """The requirements in the text of a requirements file, without options and comments."""
    lines = (line.split(" #")[0].strip() for line in text.splitlines())
    return [line for line in lines if line and not line.startswith(("#", "-"))]


def missing_requirements(text: str) -> list[str]:
    """The requirements in the text of a requirements file that the running interpreter does not satisfy."""
    lines = requirement_lines(text)
    try:
        from packaging.requirements import Requirement
    except ImportError:  # pytest and matplotlib depend on it: where it is missing, so are they
        return lines
    return [line for line in lines if not _is_satisfied(Requirement(line))]


def _is_satisfied(requirement) -> bool:
    if requirement.marker is not None and not requirement.marker.evaluate():
        return True
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def fingerprint() -> str:
    """Changes with everything that the content of `.venv` follows from, its place included."""
    files = (REQUIREMENTS, NPU_REQUIREMENTS, REPOSITORY / "pyproject.toml", Path(__file__))
    return hashlib.sha256(b"\0".join([*(file.read_bytes() for file in files), os.fsencode(REPOSITORY)])).hexdigest()


@contextlib.contextmanager
def lock() -> Iterator[int]:
    """Holds the lock of `.venv`; yields its descriptor, which child processes are to inherit.

    A child that outlives a killed set-up so keeps the next one waiting until it has finished writing.
    """
    VENV.mkdir(exist_ok=True)
    with open(VENV / "set-up.lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            say(f"waiting for another set-up of {VENV}")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield file.fileno()


def pip_install(
    python: Path, *arguments: str, lock_fd: int | None = None, quiet: bool = False, **variables: str
) -> int:
    """Runs `pip install` from the repository's root, with its output on stderr; returns the exit status."""
    command = [python, "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    return subprocess.run(
        command,
        cwd=REPOSITORY,  # so that no path, which may hold any character, is an argument
        env=os.environ | {"PIP_USER": "0"} | variables,
        pass_fds=() if lock_fd is None else (lock_fd,),
        stdout=subprocess.DEVNULL if quiet else sys.stderr.fileno(),
        stderr=subprocess.DEVNULL if quiet else None,
    ).returncode


def split_npu_requirements() -> tuple[str, list[str]]:
    """Returns the requirement of mmcv, and the others of requirements-npu.txt."""
    lines = requirement_lines(NPU_REQUIREMENTS.read_text())
    (mmcv,) = (line for line in lines if line.startswith("mmcv"))
    return mmcv, [line for line in lines if line != mmcv]


def install_mmcv(python: Path, lock_fd: int | None = None, quiet: bool = False) -> bool:
    """Installs mmcv 1.x without its compiled operators; returns whether that worked.

    Its setup.py imports pkg_resources, which the newest setuptools lack, and reads locals() in a way that Python 3.13
    ended. Up to pip 25 the isolated build obeys PIP_CONSTRAINT, from pip 26 on only PIP_BUILD_CONSTRAINT. The former
    takes the place of a constraint of the machine's pip configuration, so it is set for this one package alone. The
    dependency on OpenCV is met by the headless package, which also loads on servers without a desktop's libraries.
    """
    dependencies = ["addict", "packaging", "yapf"]
    if subprocess.run([python, "-c", "import cv2"], capture_output=True).returncode:
        dependencies.append("opencv-python-headless")
    if pip_install(python, *dependencies, lock_fd=lock_fd, quiet=quiet):
        return False
    mmcv, _ = split_npu_requirements()
    with tempfile.TemporaryDirectory() as folder:
        constraint = Path(folder, "constraint.txt")
        constraint.write_text("setuptools<81\n")
        constraint_url = constraint.as_uri()  # pip splits these variables at blanks
        status = pip_install(
            python,
            "--no-deps",
            "--use-pep517",
            mmcv,
            lock_fd=lock_fd,
            quiet=quiet,
            PIP_CONSTRAINT=constraint_url,
            PIP_BUILD_CONSTRAINT=constraint_url,
            MMCV_WITH_OPS="0",
        )
    return status == 0


def make_venv() -> None:
    """Makes `.venv` where there is none yet; pip comes later, so that an interruption here leaves nothing half."""
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        raise SetupError(
            sys.executable,
            "this Python cannot make virtual environments",
            f"install Debian's or Ubuntu's package for it (apt-get install python{version}-venv) and start again",
        )
    with lock() as lock_fd:
        if not VENV_PYTHON.exists():
            say(f"making {VENV} with Python {sys.version.split()[0]}")
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", VENV], pass_fds=(lock_fd,))
    check = "import sys; sys.exit(sys.version_info < (3, 10))"
    if not VENV_PYTHON.exists() or subprocess.run([VENV_PYTHON, "-c", check]).returncode:
        raise SetupError(str(VENV), "its Python does not run, or is older than 3.10", "remove the folder, start again")


def venv_is_complete() -> bool:
    """Whether `.venv`, whose interpreter runs this, was set up to the end and still has everything."""
    importlib.invalidate_caches()
    stamped = STAMP.exists() and STAMP.read_text() == fingerprint()
    return stamped and not missing_requirements(REQUIREMENTS.read_text())


def complete_venv() -> None:
    """Installs into `.venv`, whose interpreter runs this, what it lacks."""
    if venv_is_complete():
        return
    with lock() as lock_fd:
        if venv_is_complete():
            return
        start = time.monotonic()
        if subprocess.run([VENV_PYTHON, "-m", "pip", "--version"], capture_output=True).returncode:
            subprocess.run([VENV_PYTHON, "-m", "ensurepip"], pass_fds=(lock_fd,), stdout=sys.stderr.fileno())
        say("installing requirements.txt (5 GB and minutes where pip takes torch's CUDA build)")
        # pip 21.3 is the first that can install this repository editable.
        if pip_install(VENV_PYTHON, "pip>=21.3", "-r", "requirements.txt", lock_fd=lock_fd):
            raise SetupError("requirements.txt", "pip failed, see above", "start again to continue", exit_status=1)
        say("installing the repository itself, editable")
        if pip_install(VENV_PYTHON, "--no-deps", "-e", ".", lock_fd=lock_fd):
            raise SetupError("pyproject.toml", "pip failed, see above", "start again to continue", exit_status=1)
        say("building mmcv, which only runs on NPUs need")
        if not install_mmcv(VENV_PYTHON, lock_fd, quiet=True):
            say(f"mmcv cannot be built here, all but NPU runs work; {MMCV_REMEDY}")
        temporary = STAMP.with_suffix(".tmp")
        temporary.write_text(fingerprint())
        temporary.replace(STAMP)
        say(f"done in {time.monotonic() - start:.0f} s")


def set_up(in_venv: bool) -> Path:
    """Returns an interpreter that satisfies requirements.txt.

    Args:
        in_venv: this is the second stage, run by `.venv`'s own interpreter.

    Raises:
        SetupError: a step failed, or the machine lacks something.
    """
    if in_venv or Path(sys.prefix).resolve() == VENV.resolve():
        complete_venv()
        say(f"using {VENV}")
        return VENV_PYTHON
    missing = [re.split(r"[<>=!~; ]", line)[0] for line in missing_requirements(REQUIREMENTS.read_text())]
    if not missing:
        say(f"using {sys.executable}, which satisfies requirements.txt")
        return Path(sys.executable)
    say(f"{sys.executable} does not satisfy requirements.txt ({', '.join(missing)}), so {VENV} is used")
    make_venv()
    sys.stderr.flush()
    os.execv(VENV_PYTHON, [str(VENV_PYTHON), __file__, "--in-venv"])


def install_npu_requirements(everything: bool) -> None:
    """Installs mmcv or, with `everything`, all of requirements-npu.txt into the running interpreter.

    Raises:
        SetupError: pip failed.
    """
    python = Path(sys.executable)
    _, others = split_npu_requirements()
    if everything and pip_install(python, "-r", "requirements.txt", *others):
        raise SetupError("requirements-npu.txt", "pip failed, see above", "start again to continue", exit_status=1)
    if not install_mmcv(python):
        raise SetupError("mmcv", "pip failed, see above", "it builds with Python 3.10 to 3.12", exit_status=1)


def main() -> int:
    parser = argparse.ArgumentParser(description="Sets up the environment and prints its interpreter.")
    parser.add_argument("--mmcv", action="store_true", help="install mmcv into this interpreter and stop")
    parser.add_argument("--npu", action="store_true", help="install requirements-npu.txt into it and stop")
    parser.add_argument("--in-venv", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    try:
        if options.npu or options.mmcv:
            install_npu_requirements(everything=options.npu)
        else:
            sys.stdout.buffer.write(os.fsencode(set_up(options.in_venv)) + b"\n")
    except SetupError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("error: set-up: interrupted; start again to continue", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
