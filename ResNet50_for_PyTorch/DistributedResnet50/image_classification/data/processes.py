"""Work spread over processes, with progress and the time left, that can be stopped at any moment."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, ProcessPoolExecutor, wait
from itertools import islice
from typing import TypeVar

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from image_classification.data.decode import prepare_worker

POLL_SECONDS = 0.2
QUEUED_PER_WORKER = 2
LOG_SECONDS = 30
"""Where stderr is a file, a line this often takes the place of the bar."""
Task, Result = TypeVar("Task"), TypeVar("Result")
Advance = Callable[[], None]
"""Called after each picture."""

_counter = None
"""Pictures that the processes have dealt with; each process of a pool is given it when it starts."""


def run_tasks(
    function: Callable[[Task, Advance], Result],
    tasks: Iterable[Task],
    *,
    workers: int,
    title: str,
    total: int,
    done: int = 0,
) -> Iterator[Result]:
    """Calls a function with each task, in this process or in others, and yields the results as they come.

    Closing the iterator stops the work.

    Args:
        function: at the top level of a module; it may be stopped at any moment.
        tasks: are asked for when they are needed.
        workers: processes; with 1 the work is done in this one.
        title: what is done, for the progress bar.
        total, done: pictures in all, and those that earlier runs have dealt with.

    Raises:
        BrokenProcessPool: a process was killed.
    """
    report = _Report(title, total, done)
    prepare_worker()
    if workers == 1:
        with report.bar:
            for task in tasks:
                yield function(task, report.advance)
        return
    others = set(multiprocessing.active_children())
    # Forked, because a new interpreter would take seconds to import torch; before the bar starts its thread.
    context = multiprocessing.get_context("fork")
    counter = context.Value("q", 0)
    pool = ProcessPoolExecutor(workers, context, _start_process, (counter,))
    try:
        remaining = iter(tasks)
        waiting = {pool.submit(_call, function, task) for task in islice(remaining, QUEUED_PER_WORKER * workers)}
        with report.bar:
            while waiting:
                finished, waiting = wait(waiting, POLL_SECONDS, FIRST_COMPLETED)
                report.update(done + counter.value)
                waiting |= {pool.submit(_call, function, task) for task in islice(remaining, len(finished))}
                for future in finished:
                    yield future.result()
    finally:
        # Those that still work are not waited for: what they were at is not complete and does not count.
        pool.shutdown(wait=False, cancel_futures=True)
        for process in set(multiprocessing.active_children()) - others:
            process.terminate()
            process.join()


def default_workers() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _start_process(counter) -> None:
    global _counter
    _counter = counter
    # Ctrl-C reaches every process of a terminal and the first one decides; it stops the others by SIGTERM.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A killed parent cannot stop its processes; they would go on writing beside its successor's."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(function: Callable[[Task, Advance], Result], task: Task) -> Result:
    return function(task, _advance)


def _advance() -> None:
    with _counter.get_lock():
        _counter.value += 1


class _Report:
    """A bar with speed and time left on a terminal, else a line every LOG_SECONDS."""

    def __init__(self, title: str, total: int, done: int):
        self._title, self._total, self._completed, self._done_before = title, total, done, done
        self._started = self._logged = time.monotonic()
        console = Console(stderr=True)
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[speed]}, time left"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self.bar.add_task(title, total=total, completed=done, speed="")

    def advance(self) -> None:
        self.update(self._completed + 1)

    def update(self, completed: int) -> None:
        self._completed, now = completed, time.monotonic()
        speed = (completed - self._done_before) / max(now - self._started, 1e-9)
        self.bar.update(self._task, completed=completed, speed=f"{speed:,.0f} images/s")
        if self.bar.disable and now - self._logged >= LOG_SECONDS:
            self._logged = now
            left = f"{(self._total - completed) / speed / 60:,.0f} minutes left" if speed else "none done yet"
            progress = f"{completed:,} of {self._total:,} images, {speed:,.0f} images/s, {left}"
            print(f"{self._title}: {progress}", file=sys.stderr, flush=True)
