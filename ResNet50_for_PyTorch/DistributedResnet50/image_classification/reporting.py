"""What a run prints and writes: console, train.log, metrics.jsonl, summary.json and the ModelZoo result block.

Only global rank 0 has a `Reporter`. The device is read when it logs, and between two log lines not at all.
"""

import json
import math
import os
import platform
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from image_classification.config import RunPlan, TrainConfig, to_plain
from image_classification.curves import draw_curves
from image_classification.data import printable
from image_classification.metrics import Metrics, MetricSums, top_k
from image_classification.throughput import ThroughputMeter
from image_classification.training import TrainState
from mmcls.utils.device import device_name, is_simulated, peak_memory_bytes, synchronize

BAD_FILES = "bad_files.txt"
CASE_SUFFIXES = {"full": "acc", "performance": "perf"}


def case_name(config: TrainConfig, world_size: int) -> str:
    """The ModelZoo's name of a run, for instance ResNet50_for_PyTorch_bs16_8p_acc."""
    kind = "eval" if config.run.evaluate else CASE_SUFFIXES[config.run.recipe]
    return f"{network_name(config)}_bs{config.data.batch_size}_{world_size}p_{kind}"


def network_name(config: TrainConfig) -> str:
    return f"{config.model.arch.replace('resnet', 'ResNet')}_for_PyTorch"


def create_run_folder(parent: Path) -> Path:
    """Creates a folder named by the time, which no other run has."""
    name = time.strftime("%Y%m%d-%H%M%S")
    parent.mkdir(parents=True, exist_ok=True)
    for number in range(1000):
        folder = parent / (f"{name}-{number}" if number else name)
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            continue
    raise FileExistsError(f"{parent}: 1000 runs in one second")


def _installed_versions() -> dict[str, str]:
    """Versions of what the numbers of a run depend on, as far as it is installed."""
    found = {}
    for name in ("torch", "numpy", "torch_npu", "mmcv"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def write_json(contents: dict, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)


def record_failure(folder: Path, status: str, error: str, details: str) -> None:
    """Marks a run that did not finish; `status` is failed, diverged or stopped, `details` a traceback or nothing."""
    for half_file in folder.glob(".*.tmp"):  # of a rank that was killed while it wrote
        half_file.unlink(missing_ok=True)
    path = folder / "summary.json"
    summary = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    write_json(summary | {"status": status, "error": error}, path)
    with (folder / "train.log").open("a", encoding="utf-8") as log:
        log.write(f"{details}{status}: {error}\n")


class Reporter:
    """Tells how the run goes; an Observer of training.py.

    Args:
        config: the resolved configuration.
        plan: the numbers of the run.
        num_classes: outputs of the network; with fewer than five, "top-5" is the top that many.
        device: the device of this rank.
        started_at: when the user started the command, seconds since the epoch.
    """

    def __init__(self, config: TrainConfig, plan: RunPlan, num_classes: int, device: torch.device, started_at: float):
        self._config, self._plan, self._device, self._started_at = config, plan, device, started_at
        self._k = top_k(num_classes)
        self._meter = ThroughputMeter(lambda: synchronize(device), config.run.throughput_warmup_steps)
        self._case = case_name(config, plan.world_size)
        self._console = Console(highlight=False, soft_wrap=True)
        self._progress: Progress | None = None
        self._epochs: list[dict] = []
        self._num_bad_images = 0
        self.folder: Path | None = None
        self._log = self._metrics = None

    def open(self, parent: Path, notes_before: Sequence[str], notes: Sequence[str]) -> Path:
        """Creates the run's folder and says what the run is made of.

        Args:
            parent: folder of all runs.
            notes_before: what the launcher found out and has printed, a line each.
            notes: what this rank found out.
        """
        self.folder = create_run_folder(parent / self._case)
        self._log = (self.folder / "train.log").open("a", encoding="utf-8", buffering=1)
        self._metrics = (self.folder / "metrics.jsonl").open("a", encoding="utf-8", buffering=1)
        plain = to_plain(self._config)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(plain, sort_keys=False), encoding="utf-8")
        write_json(self._facts() | {"status": "running"}, self.folder / "summary.json")
        for note in notes_before:
            self.say(note, console=False)
        for note in notes:
            self.say(note)
        for section, values in plain.items():
            self.say(f"{section}: " + ", ".join(f"{name}={value}" for name, value in values.items()))
        if is_simulated(self._device):
            self.say("simulated NPU: accuracy is the CPU's, times mean nothing")
        self.say(f"writing to {self.folder}")
        return self.folder

    def say(self, line: str, console: bool = True) -> None:
        """Writes a line to train.log and, unless the progress bar stands for it, to the console."""
        if self._log:
            self._log.write(line + "\n")
        if console:
            self._console.print(line, markup=False, emoji=False)
            sys.stdout.flush()

    def training_started(self, state: TrainState) -> None:
        self._reset_window()
        self._epoch_sums = MetricSums.zeros(self._device)
        if self._console.is_terminal:
            columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
            self._progress = Progress(*columns, console=self._console, transient=True)
            self._task = self._progress.add_task("training", total=self._plan.total_steps, completed=state.step)
            self._progress.start()

    def _reset_window(self) -> None:
        self._window_sums = MetricSums.zeros(self._device)
        self._window_started = time.perf_counter()
        self._window_data_seconds, self._window_steps = 0.0, 0

    def step_done(self, state: TrainState, sums: MetricSums, data_seconds: float) -> None:
        """Takes note of a step; logs every `print_freq` steps and at the end of an epoch."""
        self._meter.step_done(self._plan.global_batch_size)
        self._window_sums += sums
        self._epoch_sums += sums
        self._window_steps += 1
        self._window_data_seconds += data_seconds
        if self._progress:
            self._progress.advance(self._task)
        in_epoch = (state.step - 1) % self._plan.steps_per_epoch + 1
        last = in_epoch == self._plan.steps_per_epoch or state.step == self._plan.total_steps
        if in_epoch % self._config.run.print_freq == 0 or last:
            self._log_window(state, in_epoch)

    def _log_window(self, state: TrainState, in_epoch: int) -> None:
        window, epoch_so_far = self._window_sums.averages(), self._epoch_sums.averages()
        seconds = time.perf_counter() - self._window_started
        epoch, steps = (state.step - 1) // self._plan.steps_per_epoch, self._plan.steps_per_epoch
        step_seconds, data_seconds = seconds / self._window_steps, self._window_data_seconds / self._window_steps
        waiting = data_seconds / step_seconds
        lr = state.optimizer.param_groups[0]["lr"]
        line = (
            f"Epoch: [{epoch}][{in_epoch:{len(str(steps))}}/{steps}] Time {step_seconds:.3f} Data {data_seconds:.3f} ({waiting:.0%}) "
            f"Loss {window.loss:.4f} ({epoch_so_far.loss:.4f}) "
            f"Acc@1 {window.top1_percent:.2f} ({epoch_so_far.top1_percent:.2f}) "
            f"Acc@{self._k} {window.top5_percent:.2f} ({epoch_so_far.top5_percent:.2f}) lr {lr:.6g}"
        )
        scale = state.precision.loss_scale
        if state.precision.scales_loss:
            line += f" Scale {scale:g} Skipped {state.precision.skipped_updates}"
        self.say(line, console=self._progress is None)
        self._record(
            kind="train", epoch=epoch, step=state.step, lr=lr, loss=window.loss, top1_percent=window.top1_percent,
            step_seconds=step_seconds, data_seconds=data_seconds, data_share_percent=100 * waiting,
            loss_scale=scale, skipped_updates=state.precision.skipped_updates,
        )  # fmt: skip
        self._reset_window()

    def bad_images_found(self, reasons: dict[str, str]) -> None:
        """Lists the pictures that were skipped so far, by their paths, and says how many there are if they are more."""
        if len(reasons) == self._num_bad_images:
            return
        self._num_bad_images = len(reasons)
        lines = [f"{printable(path)}\t{printable(reason)}\n" for path, reason in sorted(reasons.items())]
        (self.folder / BAD_FILES).write_text("".join(lines), encoding="utf-8")
        self._say_bad_images()

    def _say_bad_images(self) -> None:
        if self._num_bad_images:
            self.say(
                f"images that cannot be read and were skipped: {self._num_bad_images}, see {self.folder / BAD_FILES}"
            )

    def training_paused(self) -> None:
        self._epoch_images_per_second = self._meter.pause()

    def epoch_done(
        self, state: TrainState, epoch: int, train: Metrics, validation: Metrics, ema: Metrics | None
    ) -> None:
        averaged = {} if ema is None else {"ema_top1_percent": ema.top1_percent, "ema_loss": ema.loss}
        self._record(
            kind="epoch", epoch=epoch, step=state.step, lr=state.optimizer.param_groups[0]["lr"],
            train_loss=train.loss, train_top1_percent=train.top1_percent, val_loss=validation.loss,
            val_top1_percent=validation.top1_percent, val_top5_percent=validation.top5_percent, k=self._k,
            images_per_second=self._epoch_images_per_second, best_top1_percent=state.best[0], **averaged,
        )  # fmt: skip
        rate = self._epoch_images_per_second
        self.say(
            f"Epoch {epoch}: train loss {train.loss:.4f} Acc@1 {train.top1_percent:.3f} | validation "
            f"{self._validation_text(validation)}{self._average_text(ema)} | best {state.best[0]:.3f} in epoch {state.best[1]} | "
            f"{'n/a' if rate is None else f'{rate:.1f}'} images/s"
        )
        self._epoch_sums = MetricSums.zeros(self._device)
        self._reset_window()

    def _record(self, **values) -> None:
        finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
        record = {"time": time.time(), **finite}  # JSON has neither inf nor nan
        self._metrics.write(json.dumps(record) + "\n")
        if values["kind"] == "epoch":
            self._epochs.append(record)

    def _facts(self) -> dict:
        return {
            "case_name": self._case,
            "network": network_name(self._config),
            "device_type": self._device.type,
            "device_name": device_name(self._device),
            "simulated": is_simulated(self._device),
            "machine": platform.machine(),
            "versions": {"python": platform.python_version(), **_installed_versions()},
            "command": sys.argv,
            "process": os.getpid(),
            **to_plain(self._plan),
        }  # fmt: skip

    def _stop_progress(self) -> None:
        if self._progress:
            self._progress.stop()
            self._progress = None

    def close(self) -> None:
        """Stops the progress bar and closes the files; what stands in them stays."""
        self._stop_progress()
        for file in (self._log, self._metrics):
            if file:
                file.close()
        self._log = self._metrics = None

    def evaluation_done(self, validation: Metrics, ema: Metrics | None) -> None:
        self.say(f"Validation: {self._validation_text(validation)}{self._average_text(ema)}")
        results = {"val_loss": validation.loss, "val_top1_percent": validation.top1_percent,
                   "val_top5_percent": validation.top5_percent, "k": self._k,
                   "skipped_images": self._num_bad_images}  # fmt: skip
        if ema is not None:
            results["ema_top1_percent"] = ema.top1_percent
        write_json(self._facts() | {"status": "done", **results}, self.folder / "summary.json")

    def run_done(self, state: TrainState) -> None:
        """Writes the summary, the ModelZoo log and the curves, and ends the console with the result block."""
        self._stop_progress()
        rate, last = self._meter.images_per_second, self._epochs[-1]
        shown_rate = f"n/a (needs more than {self._steps_needed()})" if rate is None else f"{rate:.3f}"
        duration = time.time() - self._started_at
        results = {
            "images_per_second": rate,
            "throughput_images": self._meter.images,
            "throughput_seconds": self._meter.seconds,
            "throughput_warmup_steps": self._meter.warmup_steps,
            "final_top1_percent": last["val_top1_percent"],
            "final_top5_percent": last["val_top5_percent"],
            "k": last["k"],
            "final_val_loss": last["val_loss"],
            "final_train_loss": last["train_loss"],
            "best_top1_percent": state.best[0],
            "best_epoch": state.best[1],
            "final_ema_top1_percent": last.get("ema_top1_percent"),
            "steps_done": state.step,
            "skipped_updates": state.precision.skipped_updates,
            "skipped_images": self._num_bad_images,
            "e2e_seconds": duration,
            "peak_memory_bytes_rank0": peak_memory_bytes(self._device),
        }
        write_json(self._facts() | {"status": "done", **results}, self.folder / "summary.json")
        self._write_modelzoo_log(shown_rate, rate, last, duration)
        draw_curves(self._epochs, self.folder / "curves.png", self._case)
        self._say_bad_images()
        self.say(f"images/s leaves out the first {self._meter.warmup_steps} steps and the first of each epoch")
        simulated = " (simulated NPU)" if is_simulated(self._device) else ""
        self.say(f"------------------ Final result{simulated} ------------------")
        self.say(f"Final Performance images/sec : {shown_rate}")
        self.say(f"Final Train Accuracy : {last['val_top1_percent']:.2f}")
        self.say(f"E2E Training Duration sec : {duration:.0f}")

    def _steps_needed(self) -> str:
        if self._plan.steps_per_epoch == 1:
            return "1 step in an epoch"
        return f"{max(self._meter.warmup_steps, 1)} steps"

    def _write_modelzoo_log(self, shown_rate: str, rate: float | None, last: dict, duration: float) -> None:
        """Writes <CaseName>.log; TrainingTime is milliseconds per step, as the ModelZoo's scripts compute it."""
        values = {
            "Network": network_name(self._config),
            "RankSize": self._plan.world_size,
            "BatchSize": self._plan.micro_batch_size,
            "DeviceType": platform.machine(),
            "CaseName": self._case,
            "ActualFPS": shown_rate,
            "TrainingTime": "n/a" if rate is None else f"{self._plan.global_batch_size * 1000 / rate:.2f}",
            "TrainAccuracy": f"{last['val_top1_percent']:.2f}",
            "ActualLoss": "n/a" if last["train_loss"] is None else f"{last['train_loss']:.4f}",
            "E2ETrainingTime": f"{duration:.0f}",
        }
        text = "".join(f"{key} = {value}\n" for key, value in values.items())
        (self.folder / f"{self._case}.log").write_text(text, encoding="utf-8")

    def _average_text(self, ema: Metrics | None) -> str:
        return "" if ema is None else f" | averaged weights Acc@1 {ema.top1_percent:.3f} Loss {ema.loss:.4f}"

    def _validation_text(self, validation: Metrics) -> str:
        missing = self._plan.num_val_images - validation.count
        skipped = f", {missing} cannot be read" if missing else ""
        return (
            f"Acc@1 {validation.top1_percent:.3f} Acc@{self._k} {validation.top5_percent:.3f} "
            f"Loss {validation.loss:.4f} on {validation.count} images{skipped}"
        )
