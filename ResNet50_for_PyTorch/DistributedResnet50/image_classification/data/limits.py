"""What loader processes need of shared memory and file handles, and what went wrong when one is gone or stays away."""

import os
import re
import resource
import signal
from pathlib import Path

from mmcls.utils.errors import RequestError

PREFETCH_FACTOR = 2
"""Batches that each loader process works ahead."""
SHARED_MEMORY = Path("/dev/shm")
PAGE_BYTES = 4096
NUM_LOADERS = 2
"""Those of train/ and val/ of a rank; the processes and buffers of both stay while training runs."""
TIGHT = 2.0
"""Below this multiple of the need there is a warning: other programs use the same memory."""
HANDLES_PER_WORKER, SPARE_HANDLES = 8, 32

_DIED = re.compile(
    r"DataLoader worker \(pid\(?s?\)? ?([\d, ]+)\)? (?:is killed by signal: (.+?)\.|exited unexpectedly)"
)
_SIGNALS = {signal.strsignal(number): signal.Signals(number) for number in signal.valid_signals() if number < 32}


class LoaderError(RuntimeError):
    """The loader cannot go on: a process died, or no batch came in time. Its text is for the user."""


def check_limits(workers: int, batch_bytes: int, num_ranks: int) -> tuple[str, ...]:
    """Compares what the loader processes of this machine need with what it gives, before they are started.

    Args:
        workers: loader processes of each of a rank's loaders.
        batch_bytes: images of a batch.
        num_ranks: ranks of this machine.

    Returns:
        Warnings, a line each.

    Raises:
        RequestError: the loader could not work.
    """
    if workers == 0:
        return ()
    batches, warnings = num_ranks * NUM_LOADERS * num_buffers(workers), []
    if SHARED_MEMORY.is_dir():
        need = batches * batch_bytes + num_ranks * NUM_LOADERS * PAGE_BYTES
        status = os.statvfs(SHARED_MEMORY)
        free = status.f_bavail * status.f_frsize
        what = (
            f"{SHARED_MEMORY} has {_megabytes(free)} free, {batches} batches of {_megabytes(batch_bytes)}"
            f" for {_processes(workers, num_ranks)} take {_megabytes(need)}"
        )
        remedy = f"{_more_shared_memory(need)}, or fewer --workers"
        if free < need:
            raise RequestError(f"--workers={workers}", what, f"{remedy} (0 needs none)")
        if free < TIGHT * need:
            warnings.append(f"warning: {what}; that is tight: {remedy}")
    handles = _open_handles() + NUM_LOADERS * workers * HANDLES_PER_WORKER + SPARE_HANDLES
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if allowed < handles:
        # The shell may raise it up to the hard limit; above that only the machine's administrator.
        remedy = f"`ulimit -n {handles}`" if most >= handles else "let the administrator raise `nofile`"
        raise RequestError(
            f"--workers={workers}",
            f"`ulimit -n` allows {allowed} open files, a rank needs {handles}",
            f"{remedy}, or take fewer --workers",
        )
    return tuple(warnings)


def num_buffers(workers: int) -> int:
    """Batches that a loader has room for: what its processes work ahead, and the one that the consumer reads."""
    return workers * PREFETCH_FACTOR + 1


def _open_handles() -> int:
    folder = Path("/proc/self/fd")
    return len(os.listdir(folder)) if folder.is_dir() else 0


def _megabytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e6 else f"{count / 1e3:,.0f} kB"


def _processes(workers: int, num_ranks: int) -> str:
    one_rank = f"{workers} loader process{'es' * (workers > 1)}"
    return one_rank if num_ranks == 1 else f"{num_ranks} ranks with {one_rank} each"


def _more_shared_memory(need: float) -> str:
    return f"start the container with docker --shm-size={max(1, -(-2 * need // 2**30)):.0f}g"


def explain_loader_failure(text: str) -> str | None:
    """Says in plain words what torch's message about a dead loader process means; None where it is about others."""
    died = _DIED.search(text)
    if died:
        return dead_worker_line(died[1].strip(), _SIGNALS.get(died[2]))
    if "Too many open files" in text:
        return "too many open files; raise the limit by `ulimit -n 4096`, or take fewer --workers"
    if "shared memory(shm)" in text or "shared memory object" in text:
        return f"no room for the batches of loader processes: {_shared_memory_line()}"
    return None


def dead_worker_line(pid: int | str, signal_number: int | None) -> str:
    """What it means that a loader process ended by a signal, and what to do."""
    if signal_number == signal.SIGBUS:
        return f"loader process {pid} was killed by SIGBUS: {_shared_memory_line()}"
    if signal_number == signal.SIGKILL:
        return (
            f"loader process {pid} was killed by SIGKILL, most likely because the memory ran out;"
            " take fewer --workers, or give the machine or container more memory"
        )
    how = f"was killed by {signal.Signals(signal_number).name}" if signal_number else "ended by itself"
    return f"loader process {pid} {how}; what it said stands above, --workers=0 loads without such processes"


def _shared_memory_line() -> str:
    free = ""
    if SHARED_MEMORY.is_dir():
        status = os.statvfs(SHARED_MEMORY)
        bytes_free, bytes_all = (count * status.f_frsize for count in (status.f_bavail, status.f_blocks))
        free = f" ({_megabytes(bytes_free)} of {_megabytes(bytes_all)} free)"
    return (
        f"the shared memory {SHARED_MEMORY} is full{free}; start the container with a larger docker --shm-size, or"
        " take fewer --workers"
    )


def stalled_line(phase: str, timeout_seconds: float) -> str:
    """What to say when no batch came for so long.

    Args:
        phase: what waited, for instance `training epoch 3`.
    """
    return (
        f"{phase}: no batch came for {timeout_seconds:g} s; look whether the disk of the data answers, or raise"
        " --data_timeout"
    )
