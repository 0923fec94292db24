"""Every level on every device and short type: the table of levels.py, as levels_run.py saw it in training."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SIMULATOR = REPOSITORY / "test" / "npu_simulator"
PATHS = (REPOSITORY / "ResNet50_for_PyTorch" / "DistributedResnet50", REPOSITORY)
HALVES = {"cpu": ("float16", "bfloat16"), "Ascend910A": ("float16",), "Ascend910B3": ("float16", "bfloat16")}
CASES = [
    (device, level, half)
    for device, halves in HALVES.items()
    for level, half in [("O0", None), *((level, half) for half in halves for level in ("O1", "O2", "O3"))]
]


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[tuple, dict]:
    """What was seen, by device, level and short type."""
    folder, found = tmp_path_factory.mktemp("levels"), {}
    for device in HALVES:
        paths = PATHS if device == "cpu" else (SIMULATOR, *PATHS)
        changes = {"NPU_SIMULATOR_SOC": device, "PYTHONPATH": os.pathsep.join(map(str, paths)), "OMP_NUM_THREADS": "1"}
        script = str(Path(__file__).with_name("levels_run.py"))
        command = [sys.executable, script, "cpu" if device == "cpu" else "npu", str(folder / device)]
        done = subprocess.run(
            command, cwd=folder, env=os.environ | changes, capture_output=True, text=True, timeout=600
        )
        assert done.returncode == 0, done.stderr
        found |= {(device, r["opt_level"], r["half_type"]): r for r in json.loads((folder / device).read_text())}
    return found


@pytest.mark.parametrize(("device", "level", "half"), CASES)
def test_the_types_are_those_of_the_table(seen, device, level, half):
    run = seen[device, level, half]
    half = half or "float32"
    parameters = "float32" if level in ("O0", "O1") else half
    norms = half if level == "O3" else "float32"
    assert (run["parameters"], run["norms"], run["statistics"]) == ([parameters], [norms], [norms])
    assert (run["convolution"], run["logits"], run["loss"]) == ([half], [half], ["torch.float32"])
    stepped = [half] if level == "O3" else ["float32"]
    assert (run["stepped"], run["momentum"], run["saved"]) == (stepped, stepped, ["float32"])
    # ResNet-18 has 20 convolutions, three of them in shortcuts, and a linear layer with its bias.
    assert run["masters"] == (22 if level == "O2" else 0)


@pytest.mark.parametrize(("device", "level", "half"), CASES)
def test_thirty_steps_on_digits_lower_the_loss(seen, device, level, half):
    run = seen[device, level, half]
    losses = run["losses"]
    assert len(losses) == 30
    assert sum(losses[-5:]) < 0.98 * sum(losses[:5])
    # The first scale, 65536, is too large for few networks: a handful of skips at most.
    assert run["skipped"] <= 5
    scaled = level in ("O1", "O2") and half == "float16"
    assert run["scale"] == (65536 / 2 ** run["skipped"] if scaled else 1)


def test_the_same_seed_gives_the_same_losses_at_o0_on_every_device(seen):
    losses = [seen[device, "O0", None]["losses"] for device in HALVES]
    assert losses[0] == losses[1] == losses[2]
