"""A resumed run equals the uninterrupted one, bit for bit on the CPU at O0."""

import json

import pytest
import torch

STEPS = 11  # of 120 images each in an epoch of the 1,437 digits


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_resumed_run_is_bit_identical(run, run_folders, tmp_path, world_size):
    tiny = ["--data_path=digits", "--image_size=8", "--arch=resnet18", "--width_multiplier=0.125", "--device=cpu"]
    common = [*tiny, f"--batch_size={120 // world_size}", "--epochs=2", f"--nproc_per_node={world_size}"]

    def train(name: str, *flags: str):
        program = run(*common, *flags, f"--output_dir={tmp_path / name}", name=f"cwd-{name}")
        assert program.status == 0, program.err.read_text()
        (folder,) = run_folders(tmp_path / name)
        epochs = [record for record in map(json.loads, (folder / "metrics.jsonl").open()) if record["kind"] == "epoch"]
        return torch.load(folder / "checkpoint_last.pth.tar", weights_only=True), epochs, program

    straight, straight_epochs, _ = train("straight")
    part, _, _ = train("part", f"--max_steps={STEPS}")
    (folder,) = run_folders(tmp_path / "part")
    path = folder / "checkpoint_last.pth.tar"
    resumed, resumed_epochs, program = train("resumed", f"--resume={path}", f"--max_steps={2 * STEPS}")

    assert part["step"] == STEPS
    assert resumed["step"] == straight["step"] == 2 * STEPS
    for key in ("model", "optimizer", "precision", "best", "rng"):
        torch.testing.assert_close(straight[key], resumed[key], rtol=0, atol=0, msg=key)
    assert not torch.equal(part["model"]["conv1.weight"], resumed["model"]["conv1.weight"])
    for name in ("train_loss", "val_loss", "val_top1_percent", "lr"):
        assert straight_epochs[1][name] == resumed_epochs[0][name], name
    assert "next is epoch 1" in program.out.read_text()
