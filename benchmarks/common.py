"""What the benchmarks share: the machine, timing in alternating pairs, and the line of a claim."""

import os
import platform
import re
import resource
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

_FAST_BFLOAT16 = ("avx512_bf16", "amx_bf16")


def machine_line() -> str:
    """The processor, its bfloat16 instructions, the cores, threads, torch and what torch takes from the processor."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text() if cpuinfo.exists() else ""
    model = re.search(r"^model name\s*: (.+)$", text, re.MULTILINE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    bfloat16 = [flag for flag in _FAST_BFLOAT16 if re.search(rf"\b{flag}\b", text)]
    return (
        f"machine: {model[1].strip() if model else platform.processor() or platform.machine()}"
        f" ({', '.join(bfloat16) or 'no bfloat16 instructions'}), {cores} cores, {torch.get_num_threads()} threads,"
        f" Python {platform.python_version()}, torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"
    )


@dataclass(frozen=True)
class PairedTimes:
    """Seconds of each run of ours and of the peer; the runs of a pair lie next to each other in time."""

    ours_seconds: list[float]
    peer_seconds: list[float]

    @property
    def speedup(self) -> float:
        """Median over the pairs of the peer's seconds / our seconds, so drift of the machine cancels."""
        pairs = zip(self.peer_seconds, self.ours_seconds, strict=True)
        return statistics.median(peer / ours for peer, ours in pairs)

    def per_second(self, num_items: int) -> tuple[float, float]:
        """Items per second of ours and of the peer, by the median run, with `num_items` in a run."""
        return tuple(num_items / statistics.median(times) for times in (self.ours_seconds, self.peer_seconds))


def process_seconds() -> float:
    """Processor seconds of this process and of its children that have ended: a clock that other users do not turn."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def time_alternating(
    ours: Callable[[], object],
    peer: Callable[[], object],
    *,
    num_pairs: int,
    num_warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> PairedTimes:
    """Times the two in pairs; which one goes first changes from pair to pair.

    Args:
        ours: one run of ours; it ends when its work is done, so on an accelerator it synchronises.
        peer: one run of the peer, the same.
        num_pairs: pairs to time.
        num_warmup: runs of each beforehand that are not timed.
        clock: seconds, of the wall or, by `process_seconds`, of the processor.
    """
    for _ in range(num_warmup):
        ours()
        peer()
    times = PairedTimes([], [])
    order = [(ours, times.ours_seconds), (peer, times.peer_seconds)]
    for _ in range(num_pairs):
        for run, seconds in order:
            started = clock()
            run()
            seconds.append(clock() - started)
        order.reverse()
    return times


def print_claim(name: str, ours: float, peer: float, ratio: float) -> None:
    """Prints one claim as `name ours peer ratio`."""
    print(f"{name} {ours:.2f} {peer:.2f} {ratio:.3f}", flush=True)
