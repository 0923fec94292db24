"""env_npu.sh: nothing without CANN; with it, CANN's script and the variables that the user has not set."""

import os
import subprocess
from pathlib import Path

import pytest

DEFAULTS = {"HCCL_WHITELIST_DISABLE": "1", "HCCL_CONNECT_TIMEOUT": "1200", "TASK_QUEUE_ENABLE": "1"}
INSTALLED = [path for path in ("/usr/local/Ascend/ascend-toolkit", "/usr/local/Ascend/cann") if Path(path).exists()]
# As CANN's script may, it reads an unset variable and ends with a command that fails.
CANN = 'export CANN="$0 got $# arguments" PATH=/cann/bin:$PATH UNSET=$NO_SUCH_VARIABLE\nfalse\n'
pytestmark = pytest.mark.skipif(bool(INSTALLED), reason=f"the CANN in {INSTALLED} would be sourced")
STATE = "(set; shopt -po; pwd) | grep -vE '^(_|BASH_[A-Z]+|PIPESTATUS|LINENO)='"


@pytest.fixture
def run(copy, tmp_path):
    """Runs shell text in which $0 is env_npu.sh and which has one argument; returns what it prints."""

    def call(text: str, **variables: str | Path) -> str:
        command = ["bash", "--norc", "-c", f"set -euo pipefail\n{text}", copy.test / "env_npu.sh", "--argument"]
        environment = copy.environment(HOME=tmp_path / "my home", **variables)
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
        assert result.returncode == 0, result.stderr
        return result.stdout

    return call


@pytest.fixture
def exported(run):
    """The environment after sourcing env_npu.sh, as far as it differs from this process's."""

    def call(**variables: str | Path) -> dict[str, str]:
        pairs = (pair.partition("=") for pair in run('source "$0"; env -0', **variables).split("\0") if pair)
        return {name: value for name, _, value in pairs if os.environ.get(name) != value}

    return call


def test_nothing_changes_without_cann(run):
    before, after = run(f'{STATE}; echo "<>"; source "$0"; {STATE}').split("<>\n")
    assert "nounset" in before
    assert after == before


@pytest.mark.parametrize(
    ("installed", "variables"),
    [
        ("my home/Ascend/ascend-toolkit", {}),
        ("my home/Ascend/cann", {}),
        ("opt/cann", {"ASCEND_TOOLKIT_HOME": "opt/cann"}),
        ("opt/ascend-toolkit", {"ASCEND_TOOLKIT_HOME": "opt/ascend-toolkit/latest"}),
        ("opt/cann", {"ASCEND_HOME_PATH": "opt/cann"}),
    ],
)
def test_cann_is_sourced_where_it_is_installed(installed, variables, copy, exported, tmp_path):
    copy.write_executable(tmp_path / installed / "set_env.sh", CANN)
    variables = {name: tmp_path / value for name, value in variables.items()}
    for folder in variables.values():
        folder.mkdir(exist_ok=True)
    environment = exported(**variables)
    assert environment["CANN"] == f"{copy.test / 'env_npu.sh'} got 0 arguments"
    assert environment["PATH"].startswith("/cann/bin:")
    assert DEFAULTS.items() <= environment.items()


def test_what_the_user_has_set_stays(copy, exported, tmp_path):
    copy.write_executable(tmp_path / "my home/Ascend/cann/set_env.sh", CANN)
    environment = exported(HCCL_CONNECT_TIMEOUT="300", TASK_QUEUE_ENABLE="")
    assert environment["HCCL_CONNECT_TIMEOUT"] == "300"
    assert environment["TASK_QUEUE_ENABLE"] == ""
    assert environment["HCCL_WHITELIST_DISABLE"] == "1"


def test_cann_that_the_user_has_sourced_is_not_sourced_again(copy, exported, tmp_path):
    copy.write_executable(tmp_path / "my home/Ascend/cann/set_env.sh", CANN)
    environment = exported(ASCEND_OPP_PATH="/opt/other/cann/opp")
    assert "CANN" not in environment
    assert DEFAULTS.items() <= environment.items()


def test_shell_options_stay_and_a_failing_script_is_reported(copy, run, tmp_path):
    copy.write_executable(tmp_path / "my home/Ascend/cann/set_env.sh", CANN)
    before, after = run('shopt -po; echo "<>"; source "$0" 2>&1; shopt -po').split("<>\n")
    warning, _, after = after.partition("\n")
    assert warning == f"warning: {tmp_path}/my home/Ascend/cann/set_env.sh failed with status 1"
    assert after == before


def test_launchers_hand_it_to_the_program(copy, recorder, tmp_path):
    copy.write_executable(tmp_path / "my home/Ascend/cann/set_env.sh", CANN)
    copy.write_executable(recorder / "bin" / "python", "#!/usr/bin/env bash\nenv\n")
    result = copy.run(copy.test / "train_full_8p.sh", "--flag", HOME=tmp_path / "my home", VIRTUAL_ENV=recorder)
    assert {"HCCL_CONNECT_TIMEOUT=1200", f"CANN={copy.test}/train_full_8p.sh got 0 arguments"} <= set(
        result.stdout.splitlines()
    )
