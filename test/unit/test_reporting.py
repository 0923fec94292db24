"""What a run prints and writes, from a run that is played by hand."""

import dataclasses
import json
import re
import time

import pytest
import torch
import yaml
from PIL import Image

from image_classification import reporting
from image_classification.config import (
    DataConfig,
    ModelConfig,
    PrecisionConfig,
    RunConfig,
    ScheduleConfig,
    TrainConfig,
    resolve,
    to_plain,
)
from image_classification.metrics import Metrics, MetricSums
from image_classification.reporting import Reporter, case_name, create_run_folder, record_failure, write_json

BLOCK = [
    r"------------------ Final result ------------------",
    r"Final Performance images/sec : \d+\.\d{3}",
    r"Final Train Accuracy : 62\.50",
    r"E2E Training Duration sec : 3021",
]
MODELZOO_KEYS = ["Network", "RankSize", "BatchSize", "DeviceType", "CaseName", "ActualFPS", "TrainingTime",
                 "TrainAccuracy", "ActualLoss", "E2ETrainingTime"]  # fmt: skip


def configured(recipe="full", **run):
    return TrainConfig(
        model=ModelConfig(arch="resnet50", num_classes=10),
        data=DataConfig(batch_size=16),
        schedule=ScheduleConfig(epochs=2),
        run=RunConfig(recipe=recipe, **{"print_freq": 2, "throughput_warmup_steps": 1} | run),
    )


class Run:
    """A run of two epochs of five steps on eight ranks, without a network."""

    def __init__(self, parent, state, *, num_classes=10, device="cpu", steps_per_epoch=5, **run):
        self.config = configured(**run)
        self.plan = resolve(self.config, 8, steps_per_epoch * 128 + 7, 360)
        self.device = torch.device(device)
        self.reporter = Reporter(self.config, self.plan, num_classes, self.device, time.time() - 3021)
        self.state = dataclasses.replace(state, device=self.device)
        self.folder = self.reporter.open(parent, ["found by the launcher"], ["found by the rank"])

    def step(self, loss=2.0, correct=8):
        self.state.step += 1
        sums = MetricSums(torch.tensor([loss * 16, correct, 16.0, 16.0], device=self.device))
        time.sleep(0.002)
        self.reporter.step_done(self.state, sums, data_seconds=0.001)

    def epoch(self, number, top1_percent=62.5, loss=2.0, ema=None):
        for _ in range(self.plan.steps_per_epoch):
            self.step(loss)
        self.reporter.training_paused()
        validation = Metrics(1.5, top1_percent, 100.0, 360)
        if top1_percent > self.state.best[0]:
            self.state.best = (top1_percent, number)
        self.reporter.epoch_done(self.state, number, Metrics(loss, 50.0, 100.0, 640), validation, ema)

    def to_the_end(self):
        self.reporter.training_started(self.state)
        self.epoch(0, top1_percent=75.0)
        self.epoch(1)
        self.reporter.run_done(self.state)
        self.reporter.close()
        return self

    def records(self, kind):
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [record for record in map(json.loads, lines) if record["kind"] == kind]

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())


@pytest.fixture
def curves():
    """Asks `start` for real curves."""


@pytest.fixture
def start(tmp_path, make_state, monkeypatch, request):
    """Starts a run; its curves, which take a second, are drawn only where a test asks for them."""
    if "curves" not in request.fixturenames:
        monkeypatch.setattr(reporting, "draw_curves", lambda *_: None)
    runs = []

    def make(precision=PrecisionConfig(), **options):
        runs.append(Run(tmp_path / "output", make_state(precision=precision), **options))
        return runs[-1]

    yield make
    for run in runs:
        run.reporter.close()


def test_a_run_folder_is_never_shared(tmp_path, monkeypatch):
    monkeypatch.setattr(reporting.time, "strftime", lambda _: "20300101-000000")
    folders = [create_run_folder(tmp_path / "a" / "b") for _ in range(3)]
    assert [folder.name for folder in folders] == ["20300101-000000", "20300101-000000-1", "20300101-000000-2"]
    (folders[0] / "kept").write_text("kept")
    create_run_folder(tmp_path / "a" / "b")
    assert (folders[0] / "kept").read_text() == "kept"


@pytest.mark.parametrize(
    ("recipe", "evaluate", "suffix"), [("full", False, "acc"), ("performance", False, "perf"), ("full", True, "eval")]
)
def test_the_name_of_a_case(recipe, evaluate, suffix):
    assert case_name(configured(recipe, evaluate=evaluate), 8) == f"ResNet50_for_PyTorch_bs16_8p_{suffix}"


def test_the_folder_of_a_run(start, tmp_path):
    run = start()
    assert run.folder.parent == tmp_path / "output" / "ResNet50_for_PyTorch_bs16_8p_acc"
    assert yaml.safe_load((run.folder / "config.yaml").read_text()) == to_plain(run.config)
    assert run.summary["status"] == "running"


def test_what_the_launcher_printed_is_logged_and_not_printed_again(start, capsys):
    run = start()
    printed, logged = capsys.readouterr().out, (run.folder / "train.log").read_text()
    assert "found by the launcher" in logged and "found by the launcher" not in printed
    assert "found by the rank" in logged and "found by the rank" in printed


def test_everything_is_in_the_folder_at_the_end(curves, start):
    run = start().to_the_end()
    assert {path.name for path in run.folder.iterdir()} == {
        "train.log", "metrics.jsonl", "summary.json", "config.yaml", "curves.png",
        "ResNet50_for_PyTorch_bs16_8p_acc.log",
    }  # fmt: skip
    assert (run.folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    with Image.open(run.folder / "curves.png") as image:
        assert min(image.size) > 400


def test_the_console_ends_with_the_result_block(start, capsys):
    run = start().to_the_end()
    captured = capsys.readouterr()
    for text in (captured.out, (run.folder / "train.log").read_text()):
        lines = text.splitlines()
        assert all(re.fullmatch(*pair) for pair in zip(BLOCK, lines[-4:], strict=True)), lines[-4:]
        assert text.endswith("\n")
    assert captured.err == ""


def test_on_a_terminal_too(start, capsys, monkeypatch):
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("TERM", "xterm")
    run = start().to_the_end()
    printed = capsys.readouterr().out
    assert all(re.fullmatch(*pair) for pair in zip(BLOCK, printed.splitlines()[-4:], strict=True))
    assert "Epoch: [0]" not in printed and "training" in printed  # the progress bar stands for the log lines
    assert "Epoch: [0]" in (run.folder / "train.log").read_text()


def test_log_lines(start, capsys):
    run = start().to_the_end()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch: ")]
    assert [line.partition("]")[2].partition("]")[0] for line in lines] == ["[2/5", "[4/5", "[5/5"] * 2
    number = r"\d+\.\d+"
    assert re.fullmatch(
        rf"Epoch: \[0\]\[2/5\] Time {number} Data 0\.001 \(\d+%\) Loss 2\.0000 \(2\.0000\) Acc@1 50\.00 \(50\.00\) "
        rf"Acc@5 100\.00 \(100\.00\) lr 0\.05",
        lines[0],
    )
    assert lines == [line for line in (run.folder / "train.log").read_text().splitlines() if line.startswith("Epoch: ")]


def test_numbers_of_steps_are_aligned(start, capsys):
    run = start(steps_per_epoch=12, print_freq=5)
    run.reporter.training_started(run.state)
    run.epoch(0)
    printed = capsys.readouterr().out
    assert "Epoch: [0][ 5/12]" in printed and "Epoch: [0][10/12]" in printed and "Epoch: [0][12/12]" in printed


def test_paths_are_printed_as_they_are(start, capsys):
    run = start()
    run.reporter.say("in /data/[bold]x[/bold]/:x:/" + "long/" * 60)
    assert "in /data/[bold]x[/bold]/:x:/" + "long/" * 60 + "\n" in capsys.readouterr().out


def test_the_first_window_shows_its_own_loss_and_the_epochs(start):
    run = start()
    run.reporter.training_started(run.state)
    for loss in (1.0, 1.0, 4.0, 4.0):
        run.step(loss)
    lines = [line for line in (run.folder / "train.log").read_text().splitlines() if line.startswith("Epoch: ")]
    assert "Loss 4.0000 (2.5000)" in lines[1]


def test_metrics_are_one_json_object_a_line(start):
    run = start().to_the_end()
    steps, epochs = run.records("train"), run.records("epoch")
    assert [record["step"] for record in steps] == [2, 4, 5, 7, 9, 10]
    assert [record["epoch"] for record in steps] == [0, 0, 0, 1, 1, 1]
    assert all(record["loss"] == 2.0 and record["lr"] == 0.05 and record["loss_scale"] == 1.0 for record in steps)
    assert [(e["epoch"], e["val_top1_percent"], e["best_top1_percent"]) for e in epochs] == [
        (0, 75.0, 75.0),
        (1, 62.5, 75.0),
    ]
    assert all(record["images_per_second"] > 0 and "ema_loss" not in record for record in epochs)


def test_metrics_are_there_line_by_line(start):
    run = start()
    run.reporter.training_started(run.state)
    run.step()
    run.step()
    assert len(run.records("train")) == 1
    assert "Epoch: [0][2/5]" in (run.folder / "train.log").read_text()


def test_metrics_of_a_diverged_run_are_json_still(start):
    run = start()
    run.reporter.training_started(run.state)
    run.step(float("nan"))
    run.step(float("nan"))

    def refuse(constant):
        raise ValueError(f"{constant} is not JSON (RFC 8259, section 6)")

    for line in (run.folder / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=refuse)


def test_the_summary(start):
    run = start().to_the_end()
    summary = run.summary
    assert (summary["status"], summary["steps_done"]) == ("done", 10)
    assert (summary["final_top1_percent"], summary["best_top1_percent"], summary["best_epoch"]) == (62.5, 75.0, 0)
    assert summary["images_per_second"] * summary["throughput_seconds"] == pytest.approx(summary["throughput_images"])
    assert (summary["throughput_images"], summary["throughput_warmup_steps"]) == (2 * 4 * 128, 1)
    assert (summary["world_size"], summary["global_batch_size"], summary["device_type"]) == (8, 128, "cpu")
    assert summary["e2e_seconds"] == pytest.approx(3021, abs=10)
    assert summary["peak_memory_bytes_rank0"] > 2**20
    assert (summary["skipped_updates"], summary["final_ema_top1_percent"]) == (0, None)


def test_the_modelzoo_log(start):
    run = start().to_the_end()
    lines = (run.folder / "ResNet50_for_PyTorch_bs16_8p_acc.log").read_text().splitlines()
    values = dict(line.split(" = ") for line in lines)
    assert list(values) == MODELZOO_KEYS
    assert (values["Network"], values["RankSize"], values["BatchSize"]) == ("ResNet50_for_PyTorch", "8", "16")
    assert values["CaseName"] == "ResNet50_for_PyTorch_bs16_8p_acc"
    assert (values["TrainAccuracy"], values["ActualLoss"], values["E2ETrainingTime"]) == ("62.50", "2.0000", "3021")
    assert float(values["ActualFPS"]) == pytest.approx(run.summary["images_per_second"], abs=1e-3)
    assert float(values["TrainingTime"]) == pytest.approx(128 * 1000 / float(values["ActualFPS"]), abs=0.01)


def test_too_short_a_run_says_so(start, capsys):
    run = start(throughput_warmup_steps=10).to_the_end()
    assert "Final Performance images/sec : n/a (needs more than 10 steps)" in capsys.readouterr().out.splitlines()
    log = (run.folder / "ResNet50_for_PyTorch_bs16_8p_acc.log").read_text()
    assert "ActualFPS = n/a (needs more than 10 steps)\n" in log and "TrainingTime = n/a\n" in log
    assert run.summary["images_per_second"] is None


def test_a_run_of_many_steps_does_not_say_that_it_needs_more(start, capsys):
    """Windows leave out the first step of an epoch, so epochs of one step have no rate however many there are."""
    run = start(steps_per_epoch=1)
    run.reporter.training_started(run.state)
    for number in range(8):
        run.epoch(number)
    run.reporter.run_done(run.state)
    rate = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("Final Performance"))
    assert "n/a" in rate
    assert "needs more than 1 steps" not in rate


def test_with_fewer_classes_top_5_is_named_by_what_it_is(start, capsys):
    run = start(num_classes=3).to_the_end()
    printed = capsys.readouterr().out
    assert "Acc@3 100.00" in printed and "Acc@5" not in printed
    assert run.summary["k"] == 3


def test_skipped_images_are_listed_once_each_and_told(start, capsys):
    run = start()
    run.reporter.training_started(run.state)
    for reasons in ({}, {"/b/x.jpg": "truncated"}, {"/b/x.jpg": "truncated", "/a/new\nline.jpg": "empty file"}):
        run.reporter.bad_images_found(reasons)
        run.reporter.bad_images_found(reasons)
    run.epoch(0)
    run.reporter.run_done(run.state)
    assert (run.folder / "bad_files.txt").read_text() == "/a/new\\nline.jpg\tempty file\n/b/x.jpg\ttruncated\n"
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("images that cannot be read")]
    path = run.folder / "bad_files.txt"
    counts = [1, 2, 2]  # each time they become more, and at the end
    assert told == [f"images that cannot be read and were skipped: {count}, see {path}" for count in counts]
    assert run.summary["skipped_images"] == 2


def test_without_skipped_images_nothing_is_told(start, capsys):
    run = start().to_the_end()
    assert "cannot be read" not in capsys.readouterr().out
    assert not (run.folder / "bad_files.txt").exists() and run.summary["skipped_images"] == 0


def test_a_validation_that_lacks_images_says_so(start, capsys):
    run = start(evaluate=True)
    run.reporter.evaluation_done(Metrics(1.25, 40.0, 100.0, 358), None)
    assert "on 358 images, 2 cannot be read" in capsys.readouterr().out


def test_evaluation_writes_a_summary_and_no_result_block(start, capsys):
    run = start(evaluate=True)
    run.reporter.evaluation_done(Metrics(1.25, 40.0, 100.0, 10), None)
    printed = capsys.readouterr().out
    assert "Validation: Acc@1 40.000 Acc@5 100.000 Loss 1.2500 on 10 images" in printed
    assert "Final" not in printed
    assert (run.summary["status"], run.summary["val_top1_percent"]) == ("done", 40.0)
    assert "averaged weights" not in printed and "ema_top1_percent" not in run.summary


def test_the_averaged_weights_are_evaluated_beside_the_others(start, capsys):
    run = start(evaluate=True)
    run.reporter.evaluation_done(Metrics(1.25, 40.0, 100.0, 360), Metrics(1.5, 50.0, 100.0, 360))
    assert (
        "Validation: Acc@1 40.000 Acc@5 100.000 Loss 1.2500 on 360 images | averaged weights Acc@1 50.000 Loss 1.5000\n"
    ) in capsys.readouterr().out
    assert (run.summary["val_top1_percent"], run.summary["ema_top1_percent"]) == (40.0, 50.0)


def test_the_averaged_weights_have_their_place_in_an_epoch(start, capsys):
    run = start()
    run.reporter.training_started(run.state)
    run.epoch(0, ema=Metrics(1.25, 70.0, 100.0, 360))
    run.epoch(1, ema=Metrics(1.0, 72.5, 100.0, 360))
    run.reporter.run_done(run.state)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch 1: ")]
    assert len(lines) == 1 and "on 360 images | averaged weights Acc@1 72.500 Loss 1.0000 | best 62.500" in lines[0]
    assert [(e["ema_top1_percent"], e["ema_loss"]) for e in run.records("epoch")] == [(70.0, 1.25), (72.5, 1.0)]
    assert (run.summary["final_ema_top1_percent"], run.summary["final_top1_percent"]) == (72.5, 62.5)


@pytest.mark.parametrize(
    ("precision", "ending"),
    [
        (PrecisionConfig(opt_level="O0"), "lr 0.05"),
        (PrecisionConfig(opt_level="O2"), "lr 0.05"),
        (PrecisionConfig(opt_level="O1", half_type="float16"), "lr 0.05 Scale 65536 Skipped 3"),
        (PrecisionConfig(opt_level="O2", half_type="float16", loss_scale="128"), "lr 0.05 Scale 128 Skipped 3"),
    ],
)
def test_the_scale_is_told_where_the_loss_is_scaled(start, capsys, precision, ending):
    run = start(precision=precision)
    run.reporter.training_started(run.state)
    run.state.precision.skipped_updates = 3
    run.epoch(0)
    run.reporter.run_done(run.state)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Epoch: [0]")]
    assert len(lines) == 3 and all(line.endswith(f") {ending}") for line in lines)
    scale = float(ending.split()[3]) if "Scale" in ending else 1.0
    assert {(r["loss_scale"], r["skipped_updates"]) for r in run.records("train")} == {(scale, 3)}
    assert run.summary["skipped_updates"] == 3


def test_between_two_log_lines_nothing_is_read(start):
    """Tensors on the meta device have no values: reading them raises."""
    run = start(device="meta", print_freq=4)
    run.reporter.training_started(run.state)
    for _ in range(3):
        run.step()
    with pytest.raises(NotImplementedError):
        run.step()


def test_the_gap_between_epochs_is_in_no_step_time(start):
    run = start()
    run.reporter.training_started(run.state)
    run.epoch(0)
    time.sleep(0.3)
    run.reporter.epoch_done(run.state, 0, Metrics(1.0, 1.0, 1.0, 1), Metrics(1.0, 1.0, 1.0, 1), None)
    run.step()
    run.step()
    assert run.records("train")[-1]["step_seconds"] < 0.1


def test_a_failure_is_recorded(start):
    run = start()
    record_failure(run.folder, "failed", "rank 1: out of memory", "Traceback ...\n")
    assert (run.summary["status"], run.summary["error"]) == ("failed", "rank 1: out of memory")
    assert run.summary["network"] == "ResNet50_for_PyTorch"
    assert (run.folder / "train.log").read_text().endswith("Traceback ...\nfailed: rank 1: out of memory\n")


def test_a_failure_before_the_first_summary_is_recorded(tmp_path):
    record_failure(tmp_path, "stopped", "stopped by SIGINT", "")
    assert json.loads((tmp_path / "summary.json").read_text()) == {"status": "stopped", "error": "stopped by SIGINT"}


def test_json_is_replaced_as_a_whole(tmp_path):
    path = tmp_path / "summary.json"
    write_json({"a": 1}, path)
    with pytest.raises(TypeError):
        write_json({"a": object()}, path)
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]


def test_closing_twice_is_fine(start):
    run = start()
    run.reporter.close()
    run.reporter.close()
