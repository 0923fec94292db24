"""How a rank ends: from an exception to an exit status, and the word that it leaves for the launcher.

Exit statuses: 0 done, 1 failed while running, 2 wrong request, 3 diverged, 130 and 143 stopped by a signal.
"""

import json
import signal
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from image_classification.checkpoint import LAST
from image_classification.data import ImageReadError, LoaderError, explain_loader_failure
from image_classification.reporting import record_failure
from image_classification.worker import RUN_FOLDER_FILE
from mmcls.utils.ascend_errors import explain
from mmcls.utils.distribution import is_communication_error
from mmcls.utils.errors import DivergenceError, RequestError

STATUS_NAMES = {1: "failed", 2: "failed", 3: "diverged", 130: "stopped", 143: "stopped"}


@dataclass(frozen=True)
class Failure:
    """Why a rank ended.

    Attributes:
        line: what stands behind `error: `.
        details: the traceback; empty where the line says everything.
        consequence: the rank failed because another one was gone.
    """

    rank: int
    status: int
    line: str
    details: str = ""
    consequence: bool = False
    time: float = 0.0


def describe(error: BaseException, rank: int) -> Failure:
    """Turns the exception that ended a rank into its exit status and its line."""
    if isinstance(error, RequestError | DivergenceError):
        return Failure(rank, error.exit_status, str(error), time=time.time())
    if isinstance(error, KeyboardInterrupt):
        return stopped(signal.SIGINT, rank)
    text = " ".join(str(error).split())
    if isinstance(error, ImageReadError | LoaderError):
        line = text
    else:
        line = explain_loader_failure(text) or explain(text) or f"{type(error).__name__}: {text[:500]}"
    if isinstance(error, torch.OutOfMemoryError):
        line = f"{line}; take a smaller --batch_size"
    return Failure(rank, 1, line, traceback.format_exc(), is_communication_error(error), time.time())


def stopped(signal_number: int, rank: int = 0) -> Failure:
    """The end by a signal: exit status 128 + its number."""
    name = signal.Signals(signal_number).name
    return Failure(rank, 128 + signal_number, f"stopped by {name}", time=time.time())


def leave_word(failure: Failure, handover: Path) -> None:
    """Writes and renames: the launcher may read at any moment, or end this rank."""
    path = handover / f"failure_{failure.rank}.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(asdict(failure)), encoding="utf-8")
    temporary.replace(path)


def first_failure(handover: Path) -> Failure | None:
    """The earliest failure that any rank left, one that caused others before its consequences."""
    failures = []
    for path in handover.glob("failure_*.json"):
        with suppress(ValueError, TypeError):  # a full disk leaves half a file
            failures.append(Failure(**json.loads(path.read_text(encoding="utf-8"))))
    return min(failures, key=lambda failure: (failure.consequence, failure.time), default=None)


def forget_failures(handover: Path) -> None:
    """Removes what the ranks left, before they are started again."""
    for path in handover.glob("failure_*.json"):
        path.unlink()


def conclude(failure: Failure, handover: Path, num_ranks: int) -> int:
    """Marks the run's folder, prints the failure to stderr with its line last, and gives the exit status."""
    tells_rank = num_ranks > 1 and failure.status in (1, 3) and not failure.line.startswith("rank ")
    who = f"[rank {failure.rank}] " if tells_rank else ""
    run_folder = handover / RUN_FOLDER_FILE
    where = ""
    if run_folder.exists():
        folder = Path(run_folder.read_text(encoding="utf-8"))
        if failure.status > 128 and (folder / LAST).exists():
            failure = replace(failure, line=f"{failure.line}; continue with --resume={folder / LAST}")
        try:
            record_failure(folder, STATUS_NAMES[failure.status], who + failure.line, failure.details)
            where = f" (log: {folder / 'train.log'})"
        except OSError as error:
            where = f" (and the run's folder cannot be written: {error})"
    sys.stdout.flush()
    sys.stderr.write(failure.details)
    sys.stderr.write(f"error: {who}{failure.line}{where}\n")
    sys.stderr.flush()
    return failure.status
