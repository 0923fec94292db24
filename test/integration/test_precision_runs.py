"""Whole runs at every level: what they say, save and resume, and how they end when they diverge."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import torchvision

from image_classification import training
from image_classification.config import DataConfig
from image_classification.data import EvalLoader, detect_layout, open_datasets
from image_classification.launch import main

# Three steps in an epoch.
SMALL = ("--data_path=synthetic", "--synthetic_images=48", "--num_classes=10", "--image_size=8", "--arch=resnet18",
         "--width_multiplier=0.125", "--device=cpu", "--batch_size=16", "--epochs=2", "--print_freq=1")  # fmt: skip
LEVELS = ("O0", "O1", "O2", "O3")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def train(tmp_path):
    """Runs the program in this process; gives its exit status and its folder, None where it made none."""

    def run(name: str, *flags: str) -> tuple[int, Path | None]:
        status = main([*SMALL, *flags, f"--output_dir={tmp_path / name}"])
        return status, next((tmp_path / name).glob("*/*"), None)

    return run


def checkpoint_of(folder: Path) -> dict:
    return torch.load(folder / "checkpoint_last.pth.tar", weights_only=True)


def records_of(folder: Path, kind: str) -> list[dict]:
    return [record for record in map(json.loads, (folder / "metrics.jsonl").open()) if record["kind"] == kind]


@pytest.mark.parametrize(
    "flags",
    [*(("--opt_level=" + level,) for level in LEVELS), ("--opt_level=O1", "--half_type=float16"), ("--amp", "--half_type=float16")],
    ids=lambda flags: " ".join(flags),
)  # fmt: skip
def test_a_resumed_run_equals_the_uninterrupted_one(train, flags):
    _, straight = train("straight", *flags)
    _, part = train("part", *flags, "--max_steps=3")
    status, resumed = train("resumed", f"--resume={part / 'checkpoint_last.pth.tar'}", "--max_steps=6")
    assert status == 0
    expected, found = checkpoint_of(straight), checkpoint_of(resumed)
    assert found["step"] == expected["step"] == 6
    for key in ("model", "optimizer", "precision", "best"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, msg=key)
    assert not torch.equal(found["model"]["conv1.weight"], checkpoint_of(part)["model"]["conv1.weight"])
    assert {value.dtype for value in found["model"].values()} == {torch.float32, torch.int64}
    assert records_of(resumed, "epoch")[-1]["val_loss"] == records_of(straight, "epoch")[-1]["val_loss"]


def test_scale_and_counter_come_back_and_are_said(train, capsys):
    _, first = train("first", "--opt_level=O1", "--half_type=float16", "--max_steps=3")
    path = first / "checkpoint_last.pth.tar"
    contents = torch.load(path, weights_only=True)
    skipped = records_of(first, "train")[-1]["skipped_updates"]
    assert contents["precision"]["scale"] == 65536 / 2**skipped
    assert contents["precision"]["_growth_tracker"] == 3 - skipped
    torch.save(contents | {"precision": contents["precision"] | {"scale": 1024.0}}, path)
    _, second = train("second", f"--resume={path}", "--max_steps=6")
    assert "; loss scale 1024" in capsys.readouterr().out
    assert [record["loss_scale"] for record in records_of(second, "train")] == [1024.0] * 3
    assert checkpoint_of(second)["precision"]["_growth_tracker"] == 6 - skipped


def test_a_file_without_a_scale_loads_with_one_line(train, capsys):
    _, first = train("first", "--opt_level=O1", "--half_type=float16", "--max_steps=3")
    path = first / "checkpoint_last.pth.tar"
    contents = torch.load(path, weights_only=True)
    del contents["precision"]
    torch.save(contents, path)
    capsys.readouterr()
    assert train("second", f"--resume={path}", "--max_steps=6")[0] == 0
    assert capsys.readouterr().out.count("the checkpoint has no loss scale: it starts at 65536") == 1


def test_another_level_takes_over_the_weights(train, capsys):
    """From O2 to O0: the masters go on, whatever the options of O2 were."""
    _, first = train("first", "--opt_level=O2", "--half_type=float16", "--loss_scale=128", "--max_steps=3")
    path = first / "checkpoint_last.pth.tar"
    status, second = train("second", f"--resume={path}", "--max_steps=6", "--opt_level=O0")
    assert status == 0
    assert "not as in the run that is continued: opt_level was O2, is O0" in capsys.readouterr().out
    assert checkpoint_of(second)["step"] == 6


def test_o3_says_what_it_is_for(train, capsys):
    assert train("o3", "--opt_level=O3", "--max_steps=1")[0] == 0
    assert capsys.readouterr().out.count("O3 is a reference for speed") == 1


def test_saved_weights_of_o2_are_torchvisions_and_score_what_the_log_says(tmp_path):
    flags = ("--data_path=synthetic", "--synthetic_images=16", "--num_classes=4", "--image_size=32", "--stem=imagenet",
             "--batch_size=8", "--max_steps=1", "--opt_level=O2", "--device=cpu", "--lr=0.01")  # fmt: skip
    assert main([*flags, f"--output_dir={tmp_path}"]) == 0
    (folder,) = tmp_path.glob("*/*")
    weights, summary = checkpoint_of(folder)["model"], json.loads((folder / "summary.json").read_text())
    assert weights["conv1.weight"].dtype == torch.float32
    # Masters, not short weights cast back.
    assert not torch.equal(weights["conv1.weight"], weights["conv1.weight"].bfloat16().float())
    network = torchvision.models.resnet50(num_classes=4).eval()
    network.load_state_dict(weights, strict=True)
    layout = replace(detect_layout("synthetic"), num_classes=4)
    data = open_datasets(layout, DataConfig(synthetic_images=16), 32).val
    loader = EvalLoader(data, DataConfig(workers=0), batch_size=8, rank=0, world_size=1, device=torch.device("cpu"),
                        memory_format=torch.contiguous_format)  # fmt: skip
    images, labels = (torch.cat(parts) for parts in zip(*loader, strict=True))
    with torch.no_grad():
        logits = network(images)
    assert summary["final_top1_percent"] == pytest.approx(100 * (logits.argmax(1) == labels).float().mean().item())
    assert summary["final_val_loss"] == pytest.approx(F.cross_entropy(logits, labels).item(), rel=1e-4)


@pytest.mark.parametrize("level", LEVELS)
def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(train, capsys, level):
    status, folder = train("run", "--lr=1e30", "--warmup=0", f"--opt_level={level}")
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 3
    place = r"error: loss is (nan|inf) at epoch 0 step \d \(lr \d[.\d]*e\+\d\d, loss scale 1; first tensor .*: \w+ [\w.]+\);"
    assert re.match(place, error), error
    assert not list(folder.glob("*.pth.tar"))
    assert json.loads((folder / "summary.json").read_text())["status"] == "diverged"
    assert "Final" not in (folder / "train.log").read_text()


def test_twenty_skips_in_a_row_end_the_run(train, capsys, monkeypatch):
    """A loss that is inf from the fourth step on; the checkpoint of the first epoch stays."""
    calls, cross_entropy = [], training.cross_entropy

    def poisoned(logits, targets, *options):
        loss = cross_entropy(logits, targets, *options)
        calls.append(logits.requires_grad)
        return loss * float("inf") if logits.requires_grad and sum(calls) > 3 else loss

    monkeypatch.setattr(training, "cross_entropy", poisoned)
    status, folder = train("run", "--opt_level=O2", "--half_type=float16", "--epochs=20")
    error = capsys.readouterr().err.splitlines()[-1]
    assert status == 3
    scales = [record["loss_scale"] for record in records_of(folder, "train")]
    skipped_before = records_of(folder, "train")[2]["skipped_updates"]
    assert "20 updates in a row overflowed at epoch 7 step 2" in error
    assert "loss scale 1; first tensor that is not finite: loss" in error
    assert min(scales) == 1.0
    assert scales[3:6] == [2.0 ** (15 - skipped_before - k) for k in range(3)]
    assert all(value.isfinite().all() for value in checkpoint_of(folder)["model"].values())


def test_an_overflow_in_the_last_epoch_costs_one_update(train, monkeypatch):
    """The loss of one step is inf: the run ends well, and says what it cannot average."""
    steps, cross_entropy = [], training.cross_entropy

    def poisoned(logits, targets, *options):
        steps.append(logits.requires_grad)
        bad = logits.requires_grad and sum(steps) == 5
        return cross_entropy(logits, targets, *options) * (float("inf") if bad else 1.0)

    monkeypatch.setattr(training, "cross_entropy", poisoned)
    status, folder = train("run", "--opt_level=O1", "--half_type=float16", "--init_loss_scale=64")
    assert status == 0
    assert json.loads((folder / "summary.json").read_text())["skipped_updates"] == 1
    assert "ActualLoss = n/a" in (folder / f"{folder.parent.name}.log").read_text()
    assert checkpoint_of(folder)["precision"]["scale"] == 32.0


def test_options_of_the_optimizer_are_those_of_the_command(train):
    _, first = train("first", "--max_steps=3")
    resume = f"--resume={first / 'checkpoint_last.pth.tar'}"
    _, second = train("second", resume, "--max_steps=6", "--weight_decay=0.01", "--momentum=0.5")
    decay, no_decay = checkpoint_of(second)["optimizer"]["param_groups"]
    assert (decay["weight_decay"], no_decay["weight_decay"], decay["momentum"]) == (0.01, 0.0, 0.5)


def test_a_statistic_that_is_not_finite_is_not_saved(train, capsys, monkeypatch):
    """A running variance of inf shows in no loss."""

    def spoil(tensors):
        tensors["bn1.running_var"].fill_(float("inf"))

    monkeypatch.setattr(training, "average_norm_statistics", spoil)
    status, folder = train("run", "--max_steps=3")
    assert status == 3
    assert "first tensor that is not finite: bn1.running_var" in capsys.readouterr().err
    assert not list(folder.glob("*.pth.tar"))


def test_averaged_weights_are_validated_and_saved(train, capsys):
    _, folder = train("run", "--ema_decay=0.9", "--opt_level=O2")
    checkpoint, summary = checkpoint_of(folder), json.loads((folder / "summary.json").read_text())
    assert checkpoint["ema"].keys() == checkpoint["model"].keys()
    assert not torch.equal(checkpoint["ema"]["conv1.weight"], checkpoint["model"]["conv1.weight"])
    epochs = records_of(folder, "epoch")
    assert all(record["ema_loss"] > 0 and record["ema_loss"] != record["val_loss"] for record in epochs)
    capsys.readouterr()
    status, _ = train("again", "--evaluate", f"--resume={folder / 'checkpoint_last.pth.tar'}")
    assert status == 0
    text = capsys.readouterr().out
    assert f"averaged weights Acc@1 {summary['final_ema_top1_percent']:.3f} Loss {epochs[-1]['ema_loss']:.4f}" in text


def test_fine_tuning_trains_a_new_last_layer_alone(train, capsys):
    _, first = train("first", "--max_steps=3")
    path = first / "checkpoint_last.pth.tar"
    status, second = train("second", "--fine_tuning", f"--pretrained={path}", "--opt_level=O2")
    assert status == 0
    assert "new last layer" in capsys.readouterr().out
    before, after = torch.load(path, weights_only=True)["model"], checkpoint_of(second)["model"]
    assert {name for name in before if not torch.equal(before[name], after[name])} == {"fc.weight", "fc.bias"}


def test_frozen_parts_keep_weights_and_statistics(train):
    _, first = train("first", "--max_steps=3")
    path = first / "checkpoint_last.pth.tar"
    _, second = train("second", "--freeze=conv1,bn1,layer1", f"--pretrained={path}")
    before, after = torch.load(path, weights_only=True)["model"], checkpoint_of(second)["model"]
    same = {name for name in before if torch.equal(before[name], after[name])}
    assert same == {name for name in before if name.startswith(("conv1.", "bn1.", "layer1."))}


EVERYTHING = ("--mixup=0.2", "--cutmix=1", "--no_augment_epochs=1", "--clip_grad_norm=1", "--ema_decay=0.9",
              "--optimizer=lars", "--schedule=polynomial", "--label_smoothing=0.1", "--nesterov", "--deterministic",
              "--zero_init_last_norm", "--warmup=0.5", "--data_path=digits", "--batch_size=60", "--accumulation_steps=2")  # fmt: skip


def test_all_techniques_together_on_two_ranks_resume_exactly(run, run_folders, tmp_path):
    folders = {}
    for name, flags in {"straight": (), "part": ("--max_steps=5",), "resumed": ("--max_steps=10",)}.items():
        resume = [f"--resume={folders['part'] / 'checkpoint_last.pth.tar'}"] if name == "resumed" else []
        output = f"--output_dir={tmp_path / name}"
        program = run(*SMALL, *EVERYTHING, "--nproc_per_node=2", *flags, *resume, output, name=name)
        assert program.status == 0, program.err.read_text()
        (folders[name],) = run_folders(tmp_path / name)
    expected, found = checkpoint_of(folders["straight"]), checkpoint_of(folders["resumed"])
    assert found["step"] == expected["step"] == 10
    for key in ("model", "ema", "optimizer"):
        torch.testing.assert_close(found[key], expected[key], rtol=0, atol=0, msg=key)
