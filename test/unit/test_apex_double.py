"""The double of Apex keeps the rules of the real one; it needs the simulated NPU, so a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
CHECKS = TESTS / "apex_double" / "check_apex_double.py"


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910B3"])
def test_rules(soc, tmp_path):
    changes = {
        "NPU_SIMULATOR_SOC": soc,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, (TESTS / "npu_simulator", TESTS / "apex_double"))),
    }
    plain = ["-q", "--noconftest", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(CHECKS.parent)]
    command = [sys.executable, "-m", "pytest", *plain, str(CHECKS)]
    environment = os.environ | changes
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
