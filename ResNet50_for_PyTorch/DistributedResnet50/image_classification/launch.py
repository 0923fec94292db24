"""From the command line to ranks and an exit status.

One rank runs in this process. Several are started through torch's elastic agent with a function as entry point, so
that they end when this process ends, however that happens. Under somebody else's torchrun this process is a rank.
"""

import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from image_classification.cli import DEFAULT_PORT, parse
from image_classification.config import DistributedConfig, to_plain
from image_classification.data import prepare_data
from image_classification.data.check import check_data
from image_classification.outcome import (
    Failure,
    conclude,
    describe,
    first_failure,
    forget_failures,
    leave_word,
    stopped,
)
from image_classification.preflight import Job, prepare_job
from image_classification.training import StepFunction, train_step
from image_classification.worker import BUSY_WAIT_SECONDS, RUN_FOLDER_FILE, run_rank
from mmcls.utils.ascend_errors import is_busy
from mmcls.utils.distribution import started_as_rank
from mmcls.utils.errors import RequestError

SIMULATOR = str(Path(__file__).resolve().parents[3] / "test" / "npu_simulator")
LOOPBACK = "127.0.0.1"
CONSEQUENCE_WAIT_SECONDS = 10
"""How long a rank that lost its peers waits for the launcher to see which of them failed first."""


def main(arguments: Sequence[str] | None = None, step_function: StepFunction = train_step) -> int:
    """Runs the program.

    Args:
        arguments: without the program's name; those of this process unless given.
        step_function: the training step; of a module, so that ranks can import it (docs/clip_each_layer.py).

    Returns:
        The exit status.
    """
    started_at = time.time()
    is_rank = started_as_rank()
    with tempfile.TemporaryDirectory(prefix="image_classification-") as name:
        handover = Path(name)
        if not is_rank:  # a rank of torchrun must end on SIGTERM even inside a collective
            signal.signal(signal.SIGTERM, _raise_stopped)
        try:
            config, layout = parse(sys.argv[1:] if arguments is None else arguments)
            if config.run.check_data:
                check_data(prepare_data(layout), config.data, lambda line: print(line, flush=True))
                return 0
            if config.distributed.simulate_npu:
                _use_simulated_npu()
            job = prepare_job(config, layout, started_at)
            job = replace(job, handover=handover, step_function=step_function)
            if config.run.print_config:
                print(yaml.safe_dump(to_plain(job.config) | {"plan": to_plain(job.plan)}, sort_keys=False), end="")
                return 0
            if os.environ.get("RANK", "0") == "0":
                print("\n".join(job.notes), flush=True)
            if not is_rank and job.num_ranks * config.distributed.world_size > 1:
                return _launch_ranks(job)
            run_rank(job)
            return 0
        except (Exception, KeyboardInterrupt, _Stopped) as error:
            failure = (
                error.args[0] if isinstance(error, _Stopped) else describe(error, int(os.environ.get("RANK", "0")))
            )
        if is_rank and failure.status == 2 and os.environ["LOCAL_RANK"] != "0":
            return failure.status  # every rank of a machine finds the same wrong request; one says so
        return conclude(failure, handover, int(os.environ["WORLD_SIZE"]) if is_rank else 1)


def _use_simulated_npu() -> None:
    """Puts the simulated torch_npu first on the path, of this process and of those that it starts."""
    sys.path.insert(0, SIMULATOR)
    os.environ["PYTHONPATH"] = os.pathsep.join([SIMULATOR, *filter(None, [os.environ.get("PYTHONPATH")])])


class _Stopped(BaseException):
    """SIGTERM came; not an Exception, since code that reads foreign files catches every one of those."""


def _raise_stopped(signal_number: int, _frame: object) -> None:
    raise _Stopped(stopped(signal_number))


def _launch_ranks(job: Job) -> int:
    for name in ("torch.distributed.elastic", "torch.distributed.launcher", "torch.multiprocessing"):
        _silence(name)
    # A rank that is ended leaves semaphores of its loader processes. Python's tracker removes them, but would say so
    # after our last line.
    filters = [os.environ.get("PYTHONWARNINGS"), "ignore:resource_tracker:UserWarning"]
    os.environ["PYTHONWARNINGS"] = ",".join(filter(None, filters))
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // job.num_ranks)))
    try:
        failure = _run_agent(job)
        if failure and _may_mend(failure, job):
            print(f"{failure.line}; trying once more in {BUSY_WAIT_SECONDS} s", file=sys.stderr, flush=True)
            time.sleep(BUSY_WAIT_SECONDS)
            forget_failures(job.handover)
            failure = _run_agent(job)
    except SignalException as error:
        failure = stopped(error.sigval)
    return conclude(failure, job.handover, job.num_ranks * job.config.distributed.world_size) if failure else 0


def _run_agent(job: Job) -> Failure | None:
    try:
        elastic_launch(_launch_config(job), _rank_main)(job)
    except ChildFailedError as error:
        return _pick_failure(error, job.handover, job.config.distributed.rank * job.num_ranks)
    return None


def _may_mend(failure: Failure, job: Job) -> bool:
    """Whether a port or card was still held by an old job, and no rank had begun to train.

    One rank alone cannot try again: the others are already in the group that it could not join.
    """
    has_begun = (job.handover / RUN_FOLDER_FILE).exists()
    return is_busy(failure.line) and not has_begun and job.config.distributed.world_size == 1


def _silence(logger_name: str) -> None:
    """The agent logs each rank that it ends, with its own traceback; `conclude` says it once and in plain words."""
    for name in list(logging.root.manager.loggerDict):
        if name.startswith(logger_name):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _launch_config(job: Job) -> LaunchConfig:
    distributed = job.config.distributed
    # Only global rank 0 speaks; what the others print (warnings, crashes of native code) goes into files.
    quiet = range(1 if distributed.rank == 0 else 0, job.num_ranks)
    common = {
        "min_nodes": distributed.world_size,
        "max_nodes": distributed.world_size,
        "nproc_per_node": job.num_ranks,
        "max_restarts": 0,
        "monitor_interval": 0.2,
        "start_method": "spawn",
        "run_id": "image_classification",
        "signals_to_handle": "SIGTERM,SIGINT",
        "logs_specs": DefaultLogsSpecs(log_dir=str(job.handover), redirects={rank: Std.ALL for rank in quiet}),
    }
    if distributed.world_size > 1:
        # Until the machines have met, this process waits in C++, where no Python handler runs; it has no ranks yet.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        host, port = _meeting_point(distributed)
        return LaunchConfig(
            **common, rdzv_backend="static", rdzv_endpoint=f"{host}:{port}", rdzv_configs={"rank": distributed.rank}
        )
    # One machine: ranks talk over loopback.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return LaunchConfig(
        **common, rdzv_backend="c10d", rdzv_endpoint=f"{LOOPBACK}:{_chosen_port(distributed)}", local_addr=LOOPBACK
    )


def _meeting_point(distributed: DistributedConfig) -> tuple[str, int]:
    """Host and port of several machines, from --dist_url or MASTER_ADDR and MASTER_PORT."""
    address = os.environ.get("MASTER_ADDR", "")
    url = distributed.dist_url or f"tcp://{address}:{os.environ.get('MASTER_PORT', DEFAULT_PORT)}"
    host, _, port = url.removeprefix("tcp://").rpartition(":")
    if not host or not port.isdecimal():
        subject = f"--dist_url={url}" if distributed.dist_url else f"--world_size={distributed.world_size}"
        raise RequestError(subject, "does not say where the machines meet", "give --dist_url=tcp://HOST:PORT on each")
    if distributed.rank == 0:
        _check_port(port, "--dist_url")
    return host, int(port)


def _chosen_port(distributed: DistributedConfig) -> int:
    """On one machine: the port of --dist_url or MASTER_PORT, which must be free; else 0, which takes a free one."""
    if distributed.dist_url:
        return _check_port(distributed.dist_url.rpartition(":")[2], "--dist_url")
    text = os.environ.get("MASTER_PORT")
    return 0 if text is None else _check_port(text, "MASTER_PORT")


def _check_port(text: str, name: str) -> int:
    """torch's store listens on all interfaces, so the port must be free on all of them."""
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise RequestError(f"{name}={text}", "is no port", "take a number from 1 to 65535")
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", int(text)))
        except OSError as error:
            raise RequestError(
                f"{name}={text}", f"port {text} is in use", f"set {name} to another, or leave it out for a free one"
            ) from error
    return int(text)


def _rank_main(job: Job) -> None:
    """The entry point of a rank."""
    # Default actions: a signal ends the rank even inside a collective. The agent sends SIGTERM, the kernel SIGINT
    # when the launcher is gone, and a terminal's Ctrl-C reaches every rank by itself.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    try:
        run_rank(job)
    except Exception as error:
        failure = describe(error, int(os.environ["RANK"]))
        leave_word(failure, job.handover)
        if failure.consequence:
            time.sleep(CONSEQUENCE_WAIT_SECONDS)
        sys.exit(failure.status)


def _pick_failure(error: ChildFailedError, handover: Path, first_rank: int) -> Failure:
    """The failure to tell: the first that a rank explained, unless one was killed and could explain nothing."""
    told = first_failure(handover)
    if told is not None and not told.consequence:
        return told
    local_rank, process = error.get_first_failure()
    if process.exitcode < 0 or told is None:
        end = (
            f"was killed by signal {-process.exitcode} ({signal.Signals(-process.exitcode).name})"
            if process.exitcode < 0
            else f"ended with status {process.exitcode}"
        )
        hint = "; SIGKILL is often the system's answer to too little memory" if process.exitcode == -9 else ""
        rank = first_rank + local_rank
        return Failure(rank, 1, f"rank {rank} {end}{hint}", _last_words(handover, local_rank))
    return told


def _last_words(handover: Path, local_rank: int) -> str:
    """The end of what a rank printed to stderr, less the list of modules with which Python ends a crash."""
    files = list(handover.glob(f"**/{local_rank}/stderr.log"))
    lines = [line for file in files for line in file.read_text(errors="replace").splitlines(keepends=True)]
    return "".join(line for line in lines if not line.startswith("Extension modules:"))[-4000:]
