"""Exit statuses, and which of several failures is told."""

import json
import signal

import pytest
import torch.distributed as dist

from image_classification.checkpoint import LAST
from image_classification.data import ImageReadError, LoaderError
from image_classification.data.limits import dead_worker_line
from image_classification.outcome import Failure, conclude, describe, first_failure, leave_word, stopped
from image_classification.worker import RUN_FOLDER_FILE
from mmcls.utils.errors import DivergenceError, RequestError


def raised(error, rank=0):
    """The failure of a rank in which the error was raised."""
    try:
        raise error
    except BaseException as caught:
        return describe(caught, rank)


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RequestError("--gpu=9", "card 9 asked", "take another"), 2, "--gpu=9: card 9 asked; take another"),
        (DivergenceError("the loss is nan"), 3, "the loss is nan"),
        (ImageReadError("/d/a.JPEG", "cat", "train", "truncated"), 1,
         "cannot read image /d/a.JPEG (class cat, train): truncated"),
        (LoaderError("validation: no batch came for 5 s"), 1, "validation: no batch came for 5 s"),
        (RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. "), 1, dead_worker_line(7, 9)),
        (ValueError("two\nlines  of text"), 1, "ValueError: two lines of text"),
        (MemoryError(), 1, "MemoryError: "),
    ],
)  # fmt: skip
def test_exit_statuses_and_lines(error, status, line):
    failure = raised(error, rank=2)
    assert (failure.rank, failure.status, failure.line, failure.consequence) == (2, status, line, False)


def test_signals():
    assert raised(KeyboardInterrupt()).status == 130
    assert stopped(signal.SIGINT).status == 130
    assert stopped(signal.SIGTERM).status == 143
    assert "SIGTERM" in stopped(signal.SIGTERM).line


@pytest.mark.parametrize("saved", [True, False])
def test_a_stopped_run_names_its_checkpoint_where_there_is_one(tmp_path, capsys, saved):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".checkpoint_last.pth.tar.tmp").touch()
    if saved:
        (folder / LAST).touch()
    (tmp_path / RUN_FOLDER_FILE).write_text(str(folder))
    assert conclude(stopped(signal.SIGTERM), tmp_path, 1) == 143
    assert (f"continue with --resume={folder / LAST}" in capsys.readouterr().err) is saved
    assert not list(folder.glob(".*.tmp")), "a half file was left behind"


def test_only_surprises_have_a_traceback():
    assert raised(RequestError("a", "b", "c")).details == ""
    assert raised(DivergenceError("nan")).details == ""
    assert "Traceback" in raised(ValueError("x")).details and "test_outcome.py" in raised(ValueError("x")).details


def test_long_messages_are_cut():
    assert len(raised(RuntimeError("word " * 1000)).line) < 600


@pytest.mark.parametrize(
    ("error", "consequence"),
    [
        (RuntimeError("[gloo] Connection closed by peer [127.0.0.1]:4"), True),
        (RuntimeError("read: Connection reset by peer"), True),
        (RuntimeError("EI0002: the wait of the collective timed out"), True),
        (dist.DistBackendError("nccl"), True),
        (RuntimeError("CUDA out of memory"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_a_lost_connection_is_a_consequence(error, consequence):
    assert raised(error).consequence is consequence


def test_what_a_rank_left_is_read_back(tmp_path):
    assert first_failure(tmp_path) is None
    failure = raised(ValueError("broken 'quotes' and ü"), rank=3)
    leave_word(failure, tmp_path)
    assert first_failure(tmp_path) == failure


def test_the_cause_is_told_before_its_consequences(tmp_path):
    failures = [
        Failure(0, 1, "lost its peers", consequence=True, time=10.0),
        Failure(1, 1, "the cause", time=11.0),
        Failure(2, 1, "failed later", time=12.0),
        Failure(3, 1, "lost its peers first", consequence=True, time=9.0),
    ]
    for failure in failures:
        leave_word(failure, tmp_path)
    assert first_failure(tmp_path).line == "the cause"


def test_of_consequences_alone_the_first_is_told(tmp_path):
    for rank, moment in ((0, 10.0), (1, 9.0)):
        leave_word(Failure(rank, 1, "lost its peers", consequence=True, time=moment), tmp_path)
    assert first_failure(tmp_path).rank == 1


def test_word_that_was_cut_short_is_not_the_end_of_the_launcher(tmp_path):
    """A rank that is killed while it writes leaves half a file."""
    leave_word(Failure(1, 1, "the cause", time=11.0), tmp_path)
    (tmp_path / "failure_0.json").write_text('{"rank": 0, "sta')
    assert first_failure(tmp_path).line == "the cause"


@pytest.mark.parametrize(
    ("status", "num_ranks", "line"),
    [
        (1, 8, "error: [rank 5] it broke\n"),
        (3, 8, "error: [rank 5] it broke\n"),
        (2, 8, "error: it broke\n"),
        (1, 1, "error: it broke\n"),
        (143, 8, "error: it broke\n"),
    ],
)
def test_the_last_line(tmp_path, capsys, status, num_ranks, line):
    failure = Failure(5, status, "it broke", details="Traceback\n" if status == 1 else "")
    assert conclude(failure, tmp_path, num_ranks) == status
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", failure.details + line)


@pytest.mark.parametrize(
    ("status", "name"), [(1, "failed"), (2, "failed"), (3, "diverged"), (130, "stopped"), (143, "stopped")]
)
def test_the_folder_of_the_run_is_marked(tmp_path, capsys, status, name):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "summary.json").write_text('{"status": "running", "network": "ResNet50"}')
    (tmp_path / RUN_FOLDER_FILE).write_text(str(folder))
    assert conclude(Failure(0, status, "it broke"), tmp_path, 1) == status
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == {"status": name, "network": "ResNet50", "error": "it broke"}
    assert "it broke" in (folder / "train.log").read_text()
    assert capsys.readouterr().err == f"error: it broke (log: {folder / 'train.log'})\n"


def test_the_line_is_printed_where_the_folder_cannot_be_marked(tmp_path, capsys):
    """A full disk is what ended the run, or its folder was removed."""
    (tmp_path / RUN_FOLDER_FILE).write_text(str(tmp_path / "removed"))
    assert conclude(Failure(0, 1, "OSError: No space left on device"), tmp_path, 1) == 1
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: OSError: No space left on device")
