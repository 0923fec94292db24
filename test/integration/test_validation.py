"""Validation counts every image once: the constant-class oracle, 4 of 10 right, 40.000 % at any ranks and batch size.

Padding to 3 or 4 ranks gives 50.000, dropping the last batch of 4 gives 50.000, the mean of batch means gives 33.333.
"""

import json
import sys
from pathlib import Path

import pytest

from image_classification.launch import main

TINY = ("--arch=resnet18", "--width_multiplier=0.125", "--device=cpu", "--workers=0")


@pytest.mark.parametrize("batch_size", [1, 4, 7, 16])
def test_oracle_on_one_rank(capsys, pictures, constant_weights, tmp_path, batch_size):
    arguments = [f"--data_path={pictures}", "--evaluate", f"--pretrained={constant_weights}", *TINY]
    assert main([*arguments, f"--batch_size={batch_size}", f"--output_dir={tmp_path}"]) == 0
    assert "Acc@1 40.000 Acc@3 100.000" in capsys.readouterr().out
    (summary,) = tmp_path.glob("*/*/summary.json")
    values = json.loads(summary.read_text())
    assert (values["status"], values["num_val_images"]) == ("done", 10)
    assert values["val_top1_percent"] == pytest.approx(40.0)


@pytest.mark.parametrize("world_size", [3, 4])
def test_oracle_and_equal_ranks(run, pictures, constant_weights, tmp_path, world_size):
    root = Path(__file__).resolve().parents[2]
    output = tmp_path / "results.json"
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world_size}"]
    paths = f"{root / 'ResNet50_for_PyTorch' / 'DistributedResnet50'}:{root}"
    script = Path(__file__).with_name("oracle_ranks.py")
    program = run(str(script), str(pictures), str(constant_weights), str(output), command=torchrun, PYTHONPATH=paths)
    assert program.status == 0, program.err.read_text()
    results = json.loads(output.read_text())
    for batch_size in (1, 4, 7, 16):
        assert results[f"count at batch {batch_size}"] == 10
        assert results[f"top1 at batch {batch_size}"] == pytest.approx(40.0)
    assert results["parameter difference"] == 0
    assert results["norm difference before"] > 0, "the ranks saw the same images"
    assert results["norm difference"] == 0


def test_oracle_through_the_launcher(run, pictures, constant_weights, tmp_path):
    arguments = [f"--data_path={pictures}", "--evaluate", f"--pretrained={constant_weights}", *TINY]
    program = run(*arguments, "--nproc_per_node=3", "--batch_size=4", f"--output_dir={tmp_path / 'out'}")
    assert program.status == 0, program.err.read_text()
    assert "Acc@1 40.000 Acc@3 100.000" in program.out.read_text()
    assert program.out.read_text().count("Validation:") == 1
