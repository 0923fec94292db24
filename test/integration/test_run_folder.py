"""Eight ranks through the shell launcher: what a run prints and leaves, and that its checkpoint scores what it said."""

import json
import re
import subprocess
from pathlib import Path

import pytest
import torch
import yaml

from image_classification.launch import main

LAUNCHER = Path(__file__).resolve().parents[1] / "train_full_8p.sh"
MODELZOO_KEYS = ["Network", "RankSize", "BatchSize", "DeviceType", "CaseName", "ActualFPS", "TrainingTime",
                 "TrainAccuracy", "ActualLoss", "E2ETrainingTime"]  # fmt: skip
RESULT_BLOCK = re.compile(
    r"-{18} Final result -{18}\n"
    r"Final Performance images/sec : \d+\.\d{3}\n"
    r"Final Train Accuracy : \d+\.\d\d\n"
    r"E2E Training Duration sec : \d+\n\Z"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One run of eight ranks on digits, and the folder that it left."""
    from_anywhere = tmp_path_factory.mktemp("anywhere")
    output = tmp_path_factory.mktemp("my output")
    command = ["bash", str(LAUNCHER), "--data_path=digits", "--arch=resnet18", "--width_multiplier=0.125",
               "--image_size=8", "--batch_size=8", "--epochs=2", "--device=auto", f"--output_dir={output}"]  # fmt: skip
    done = subprocess.run(command, cwd=from_anywhere, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    (folder,) = output.glob("*/*")
    return done.stdout, folder


@pytest.mark.skipif(torch.cuda.is_available(), reason="checks what a machine without accelerator says")
def test_console(finished):
    text, _ = finished
    assert "no accelerator: 8 ranks on the CPU" in text
    assert "global batch 64 = 8 ranks x 8 x 1 accumulation" in text
    assert "learning rate 0.05 (0.2 per 256 images)" in text
    steps = re.findall(r"^Epoch: \[(\d)\]\[ *(\d+)/22\] Time .* Data .* Loss .* Acc@1 .* Acc@5 ", text, re.MULTILINE)
    assert steps == [(epoch, step) for epoch in "01" for step in ("10", "20", "22")]
    assert RESULT_BLOCK.search(text), text[-500:]


def test_files(finished):
    text, folder = finished
    names = {"train.log", "metrics.jsonl", "summary.json", "config.yaml", "curves.png", f"{folder.parent.name}.log",
             "checkpoint_last.pth.tar", "model_best.pth.tar"}  # fmt: skip
    assert {path.name for path in folder.iterdir()} == names
    assert folder.parent.name == "ResNet18_for_PyTorch_bs8_8p_acc"
    assert text.splitlines()[-4:] == (folder / "train.log").read_text().splitlines()[-4:]
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["batch_size"] == 8
    values = dict(line.split(" = ") for line in (folder / f"{folder.parent.name}.log").read_text().splitlines())
    assert list(values) == MODELZOO_KEYS
    assert (values["RankSize"], values["BatchSize"], values["CaseName"]) == ("8", "8", folder.parent.name)


def test_numbers_agree(finished):
    text, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    records = [json.loads(line) for line in (folder / "metrics.jsonl").open()]
    epochs = [record for record in records if record["kind"] == "epoch"]
    assert summary["status"] == "done"
    assert summary["world_size"] == 8
    assert summary["num_val_images"] == 360
    # 22 steps an epoch; 5 of the first and 1 of the second are left out of images/s.
    assert summary["throughput_images"] == (17 + 21) * 64
    assert summary["images_per_second"] == pytest.approx(summary["throughput_images"] / summary["throughput_seconds"])
    assert f"Final Train Accuracy : {epochs[-1]['val_top1_percent']:.2f}" in text
    assert summary["best_top1_percent"] == max(epoch["val_top1_percent"] for epoch in epochs)


@pytest.mark.parametrize("name", ["checkpoint_last.pth.tar", "model_best.pth.tar"])
def test_checkpoint_scores_what_the_log_says(finished, capsys, tmp_path, name):
    _, folder = finished
    summary = json.loads((folder / "summary.json").read_text())
    contents = torch.load(folder / name, weights_only=True)
    assert not any(key.startswith("module.") for key in contents["model"])
    assert isinstance(contents["best"][0], float)
    assert main(["--evaluate", f"--resume={folder / name}", f"--output_dir={tmp_path}", "--device=cpu"]) == 0
    expected = summary["final_top1_percent" if name.startswith("checkpoint") else "best_top1_percent"]
    assert f"Acc@1 {expected:.3f} " in capsys.readouterr().out
