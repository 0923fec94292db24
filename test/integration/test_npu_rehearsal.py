"""The rehearsal: the command of the 8-card machine, with the simulated NPU in its place."""

import importlib.util
import json
import re
import subprocess
from pathlib import Path

import pytest

from image_classification.launch import main

LAUNCHER = Path(__file__).resolve().parents[1] / "train_full_8p.sh"
RESULT_BLOCK = re.compile(
    r"-{18} Final result \(simulated NPU\) -{18}\n"
    r"Final Performance images/sec : \d+\.\d{3}\n"
    r"Final Train Accuracy : \d+\.\d\d\n"
    r"E2E Training Duration sec : \d+\n\Z"
)

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mmcv") is None, reason="mmcv 1.7.2 is not installed (test/setup_environment.py --mmcv)"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One epoch of eight ranks on digits: what it printed, and the folder that it left."""
    output = tmp_path_factory.mktemp("my output")
    command = ["bash", str(LAUNCHER), "--data_path=digits", "--simulate_npu", "--arch=resnet18", "--image_size=8",
               "--width_multiplier=0.125", "--batch_size=16", "--epochs=1", f"--output_dir={output}"]  # fmt: skip
    done = subprocess.run(command, cwd=output, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = output.glob("*/*")
    return done, folder


def test_console_says_what_it_is(finished):
    done, folder = finished
    assert RESULT_BLOCK.search(done.stdout), done.stdout[-500:]
    assert "simulated NPU: accuracy is the CPU's, times mean nothing" in done.stdout
    assert "global batch 128 = 8 ranks x 16 x 1 accumulation" in done.stdout
    assert re.search(r"^HCCL_IF_BASE_PORT=\d+, ports \d+ to \d+ for this job$", done.stdout, re.MULTILINE)
    assert "device=npu" in done.stdout
    assert done.stdout.splitlines()[-4:] == (folder / "train.log").read_text().splitlines()[-4:]
    assert "Traceback" not in done.stderr


def test_summary_says_what_it_is(finished):
    _, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    expected = {"status": "done", "simulated": True, "device_type": "npu", "device_name": "Ascend910B3",
                "world_size": 8, "steps_done": 11, "num_val_images": 360}  # fmt: skip
    assert summary.items() >= expected.items()
    assert summary["images_per_second"] > 0
    # The card's allocator, not the process: three times the 176,000 parameters at least, far below what Python needs.
    assert 2e6 < summary["peak_memory_bytes_rank0"] < 5e7
    values = dict(line.split(" = ") for line in (folder / f"{folder.parent.name}.log").read_text().splitlines())
    assert list(values) == ["Network", "RankSize", "BatchSize", "DeviceType", "CaseName", "ActualFPS", "TrainingTime",
                            "TrainAccuracy", "ActualLoss", "E2ETrainingTime"]  # fmt: skip
    assert values["RankSize"] == "8"


def test_checkpoint_scores_the_same_on_the_cpu(finished, capsys, tmp_path):
    _, folder = finished
    path = folder / "checkpoint_last.pth.tar"
    assert main(["--evaluate", f"--resume={path}", f"--output_dir={tmp_path}", "--device=cpu"]) == 0
    summary = json.loads((folder / "summary.json").read_text())
    assert f"Acc@1 {summary['final_top1_percent']:.3f} " in capsys.readouterr().out
