"""The set-up: which environment it takes, what it installs there, and what it says. Nothing here reaches a network."""

import importlib.util
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
# Plays the interpreter of .venv: pip only writes down what it is asked, and "installs" example-package; everything
# else is done by the Python that runs the tests, which sees that package.
VENV_PYTHON = rf"""#!/usr/bin/env bash
venv=$(dirname "$(dirname "$0")")
case "$*" in
"-m pip --version") exit 0 ;;
"-c import cv2") exit 1 ;;
"-m pip install "*)
    constraint=${{PIP_CONSTRAINT-none}}
    if [[ $constraint == file://* ]]; then constraint=$(cat "${{constraint#file://}}"); fi
    echo "begin $* / $constraint ${{PIP_BUILD_CONSTRAINT+build}}" >>"$RECORD"
    sleep "${{PIP_SECONDS-0}}"
    if [[ -n ${{PIP_FAILS_AT-}} && $* == *"$PIP_FAILS_AT"* ]]; then exit 1; fi
    mkdir -p "$venv/site/example_package-1.5.dist-info"
    printf 'Name: example-package\nVersion: 1.5\n' >"$venv/site/example_package-1.5.dist-info/METADATA"
    echo "end" >>"$RECORD"
    ;;
*) PYTHONPATH=$venv/site exec "{sys.executable}" "$@" ;;
esac
"""
PIP = "begin -m pip install --disable-pip-version-check"
INSTALLS = [
    f"{PIP} pip>=21.3 -r requirements.txt / none ",
    f"{PIP} --no-deps -e . / none ",
    f"{PIP} addict packaging yapf opencv-python-headless / none ",
    f"{PIP} --no-deps --use-pep517 mmcv==1.7.2 / setuptools<81 build",
]


@pytest.fixture(scope="module")
def module():
    """setup_environment.py as a module."""
    spec = importlib.util.spec_from_file_location("setup_environment", REPOSITORY / "test" / "setup_environment.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def incomplete(copy):
    """A copy whose requirements the running Python does not satisfy and whose .venv is still empty."""
    (copy.root / "requirements.txt").write_text("pytest>=1\nexample-package>=1.5\n")
    copy.write_executable(copy.venv / "bin" / "python", VENV_PYTHON)
    return copy


def start(copy, *arguments: str, **variables: str) -> subprocess.Popen:
    command = [sys.executable, copy.test / "setup_environment.py", *arguments]
    environment = copy.environment(**variables)
    return subprocess.Popen(
        command, cwd="/", env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def set_up(copy, *arguments: str, **variables: str) -> tuple[int, str, str]:
    """Runs the set-up; returns its exit status, output and messages."""
    with start(copy, *arguments, **variables) as process:
        output, messages = process.communicate(timeout=60)
    return process.returncode, output, messages


def installs(copy) -> list[str]:
    if not copy.record.exists():
        return []
    return [line for line in copy.record.read_text().splitlines() if line != "end"]


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("pytest>=1", []),
        ("# a comment\n\n-r other.txt\nPyTest >=1,<10000  # a comment", []),
        ("pytest>=10000", ["pytest>=10000"]),
        ("pytest<1\nno-such-distribution", ["pytest<1", "no-such-distribution"]),
        ('no-such-distribution; python_version < "3"', []),
        ('no-such-distribution; python_version > "3"', ['no-such-distribution; python_version > "3"']),
    ],
)
def test_missing_requirements(module, text, missing):
    assert module.missing_requirements(text) == missing


def test_without_the_packaging_library_everything_counts_as_missing(module, monkeypatch):
    monkeypatch.setitem(sys.modules, "packaging.requirements", None)
    assert module.missing_requirements("pytest>=1\n# none\nnumpy") == ["pytest>=1", "numpy"]


def test_requirements_of_the_repository_can_be_read(module):
    text = (REPOSITORY / "requirements.txt").read_text()
    assert "torch" not in [line.split(">")[0] for line in module.missing_requirements(text)]


def test_an_environment_that_has_everything_is_used_and_not_touched(copy):
    status, output, messages = set_up(copy)
    assert (status, output) == (0, f"{sys.executable}\n")
    assert messages == f"set-up: using {sys.executable}, which satisfies requirements.txt\n"
    assert not copy.venv.exists()


def test_venv_is_completed_and_the_second_call_does_nothing(incomplete):
    status, output, messages = set_up(incomplete)
    assert (status, output) == (0, f"{incomplete.venv}/bin/python\n"), messages
    assert "does not satisfy requirements.txt (example-package)" in messages
    assert installs(incomplete) == INSTALLS

    status, output, messages = set_up(incomplete)
    assert (status, output) == (0, f"{incomplete.venv}/bin/python\n")
    assert messages.endswith(f"\nset-up: using {incomplete.venv}\n")
    assert installs(incomplete) == INSTALLS


def test_changed_requirements_and_a_moved_repository_are_set_up_again(incomplete):
    set_up(incomplete)
    with open(incomplete.root / "requirements.txt", "a") as file:
        file.write("example-package<2\n")
    set_up(incomplete)
    assert installs(incomplete) == INSTALLS * 2
    incomplete.root = incomplete.root.rename(incomplete.root.with_name("moved"))
    incomplete.test = incomplete.root / "test"
    set_up(incomplete)
    assert installs(incomplete) == INSTALLS * 3


@pytest.mark.parametrize(("step", "subject"), [("requirements.txt", "requirements.txt"), ("-e .", "pyproject.toml")])
def test_a_failed_step_is_named_and_the_next_call_goes_on(step, subject, incomplete):
    status, output, messages = set_up(incomplete, PIP_FAILS_AT=step)
    assert (status, output) == (1, "")
    assert messages.splitlines()[-1].startswith(f"error: {subject}: pip failed")
    incomplete.record.unlink()
    assert set_up(incomplete)[0] == 0
    assert installs(incomplete) == INSTALLS


@pytest.mark.parametrize("step", ["addict", "mmcv"])
def test_without_mmcv_everything_else_is_set_up(step, incomplete):
    status, output, messages = set_up(incomplete, PIP_FAILS_AT=step)
    assert (status, output) == (0, f"{incomplete.venv}/bin/python\n")
    assert messages.count("mmcv cannot be built here, all but NPU runs work") == 1
    number = len(installs(incomplete))
    assert set_up(incomplete)[0] == 0
    assert len(installs(incomplete)) == number


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--mmcv", INSTALLS[2:]),
        ("--npu", [f"{PIP} -r requirements.txt torch==2.12.0 torch_npu==2.12.0 / none ", *INSTALLS[2:]]),
    ],
)
def test_npu_hosts_install_into_the_environment_of_their_choice(option, expected, module, monkeypatch, incomplete):
    others = "torch==2.12.0\n# none\ntorch_npu==2.12.0\n"
    (incomplete.root / "requirements-npu.txt").write_text(f"-r requirements.txt\n{others}mmcv==1.7.2\n")
    monkeypatch.setattr(module, "NPU_REQUIREMENTS", incomplete.root / "requirements-npu.txt")
    monkeypatch.setattr(sys, "executable", str(incomplete.venv / "bin" / "python"))
    monkeypatch.setattr(sys, "argv", ["setup_environment.py", option])
    monkeypatch.setenv("RECORD", str(incomplete.record))
    monkeypatch.delenv("PIP_CONSTRAINT", raising=False)
    assert module.main() == 0
    assert installs(incomplete) == expected
    monkeypatch.setenv("PIP_FAILS_AT", "mmcv")
    assert module.main() == 1


def test_two_at_once_install_once(incomplete):
    with start(incomplete, PIP_SECONDS="0.3") as first, start(incomplete, PIP_SECONDS="0.3") as second:
        results = [process.communicate(timeout=60) for process in (first, second)]
    assert [first.returncode, second.returncode] == [0, 0]
    assert {output for output, _ in results} == {f"{incomplete.venv}/bin/python\n"}
    assert sum("waiting for another set-up" in messages for _, messages in results) == 1
    assert installs(incomplete) == INSTALLS


def test_after_a_kill_the_next_call_waits_for_the_pip_that_still_writes_and_goes_on(incomplete):
    with start(incomplete, PIP_SECONDS="1") as process:
        while not installs(incomplete):
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGKILL)
    status, _, messages = set_up(incomplete)
    assert status == 0
    assert "waiting for another set-up" in messages
    lines = incomplete.record.read_text().splitlines()
    assert lines[:3] == [INSTALLS[0], "end", INSTALLS[0]]
    assert installs(incomplete) == INSTALLS[:1] + INSTALLS


def test_interrupt_is_one_line_and_status_130(incomplete):
    with start(incomplete, PIP_SECONDS="1") as process:
        while not installs(incomplete):
            time.sleep(0.02)
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        output, messages = process.communicate(timeout=60)
    assert (process.returncode, output) == (130, "")
    assert messages.splitlines()[-1] == "error: set-up: interrupted; start again to continue"


def test_a_venv_is_made_once_by_the_running_python(module, monkeypatch, tmp_path):
    venv = tmp_path / "it's a venv"
    monkeypatch.setattr(module, "VENV", venv)
    monkeypatch.setattr(module, "VENV_PYTHON", venv / "bin" / "python")
    module.make_venv()
    code = "import sys; print(sys.prefix, sys.version, sep='\\n')"
    printed = subprocess.check_output([venv / "bin" / "python", "-c", code], text=True)
    assert printed == f"{venv}\n{sys.version}\n"
    (venv / "bin" / "activate").unlink()
    module.make_venv()
    assert not (venv / "bin" / "activate").exists()


def test_a_python_without_ensurepip_gets_the_name_of_the_package(copy, tmp_path):
    (copy.root / "requirements.txt").write_text("example-package\n")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("import sys\nsys.modules['ensurepip'] = None\n")
    status, output, messages = set_up(copy, PYTHONPATH=str(tmp_path / "site"))
    assert (status, output) == (2, "")
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert messages.splitlines()[-1].startswith(f"error: {sys.executable}: this Python cannot make virtual env")
    assert f"apt-get install python{version}-venv" in messages
    assert not copy.venv.exists()


def test_a_venv_whose_python_does_not_run_is_refused(incomplete):
    incomplete.write_executable(incomplete.venv / "bin" / "python", "#!/bin/sh\nexit 1\n")
    status, output, messages = set_up(incomplete)
    assert (status, output) == (2, "")
    assert messages.splitlines()[-1].startswith(f"error: {incomplete.venv}: its Python does not run")


@pytest.mark.parametrize("script", ["run_tests.sh", "quickstart.sh"])
def test_without_a_new_enough_python_the_two_commands_say_so(script, copy, tmp_path):
    tools = tmp_path / "tools"
    for tool in ("bash", "dirname"):
        copy.write_executable(tools / tool, f'#!/bin/sh\nexec {shutil.which(tool)} "$@"\n')
    copy.write_executable(tools / "python3", '#!/bin/sh\n[ "$1" = --version ] && echo Python 3.8.10\n')
    result = copy.run(copy.test / script, PATH=tools)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("error: python3: Python 3.10 or newer is needed, this is 3.8.10; install it")
    (tools / "python3").unlink()
    result = copy.run(copy.test / script, PATH=tools)
    assert result.returncode == 2
    assert result.stderr.startswith("error: python3: Python 3.10 or newer is needed, this is not there; install it")


def test_run_tests_collects_once_and_passes_arguments_and_exit_status(copy):
    (copy.test / "test_one.py").write_text("def test_passes(): pass\ndef test_fails(): assert False\n")
    python = copy.write_executable(copy.root / "env/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    for flags, status, summary in (
        (["-k", "test_passes"], 0, "1 passed, 1 deselected"),
        (["."], 1, "1 failed, 1 passed"),  # not again through ResNet50_for_PyTorch/test
    ):
        result = copy.run(copy.test / "run_tests.sh", "-q", *flags, VIRTUAL_ENV=python.parent.parent)
        assert result.returncode == status, result.stdout + result.stderr
        assert summary in result.stdout


def test_quickstart_trains_in_the_environment_that_was_set_up(incomplete):
    """An active environment that lacks something must not be the one that trains."""
    program = incomplete.program
    program.write_text("import os, sys\nprint(os.environ['VIRTUAL_ENV'], *sys.argv, sep='\\n')\nsys.exit(3)\n")
    active = incomplete.write_executable(
        incomplete.root / "env/bin/python", f'#!/bin/sh\nexec "{sys.executable}" "$@"\n'
    )
    result = incomplete.run(
        incomplete.test / "quickstart.sh", "--print_freq=1", "--x=a b", VIRTUAL_ENV=active.parent.parent
    )
    lines = result.stdout.splitlines()
    assert result.returncode == 3, result.stderr
    assert lines[:2] == [str(incomplete.venv), str(program)]
    assert "--data_path=digits" in lines
    assert lines[-2:] == ["--print_freq=1", "--x=a b"]
