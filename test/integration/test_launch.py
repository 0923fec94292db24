"""Ranks, signals, ports and exit statuses, on real processes."""

import json
import os
import shutil
import signal
import socket
import sys
import time
from pathlib import Path

import pytest

PROGRAM = str(Path(__file__).resolve().parents[2] / "ResNet50_for_PyTorch" / "pytorch_resnet50_apex.py")
TINY = ("--arch=resnet18", "--width_multiplier=0.125", "--device=cpu", "--workers=0", "--print_freq=1")
ENDLESS = (*TINY, "--data_path=synthetic", "--image_size=8", "--epochs=100000", "--batch_size=8")
SHORT = (*TINY, "--data_path=digits", "--image_size=8", "--batch_size=32", "--max_steps=3")


def last_line(program) -> str:
    return program.err.read_text().splitlines()[-1]


def summary(folder) -> dict:
    (path,) = folder.glob("*/*/summary.json")
    return json.loads(path.read_text())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_end_everything(start, tmp_path, num_ranks, number, status):
    output = tmp_path / "out"
    program = start(*ENDLESS, f"--nproc_per_node={num_ranks}", f"--output_dir={output}")
    program.wait_for("Epoch: [0][")
    os.kill(program.process.pid, number)
    assert program.process.wait(20) == status
    program.wait_until_gone(10)
    assert last_line(program).startswith(f"error: stopped by {signal.Signals(number).name}")
    assert "Final" not in program.out.read_text()
    assert summary(output)["status"] == "stopped"


def test_ranks_leave_when_the_launcher_is_killed(start, tmp_path):
    program = start(*ENDLESS, "--nproc_per_node=2", f"--output_dir={tmp_path / 'out'}")
    program.wait_for("Epoch: [0][")
    program.process.kill()
    program.wait_until_gone(30)


def test_killed_rank_is_named(start, tmp_path):
    output = tmp_path / "out"
    program = start(*ENDLESS, "--nproc_per_node=2", f"--output_dir={output}")
    program.wait_for("Epoch: [0][")
    os.kill(program.ranks()[1], signal.SIGKILL)
    assert program.process.wait(30) == 1
    program.wait_until_gone(10)
    assert "rank 1 was killed by signal 9 (SIGKILL)" in last_line(program)
    assert summary(output)["status"] == "failed"
    assert "Final" not in program.out.read_text()


def test_unreadable_picture_names_its_file(run, pictures, tmp_path):
    data, output = tmp_path / "bad data", tmp_path / "out"
    shutil.copytree(pictures, data)
    whole = next((data / "train" / "n01443537").glob("*.JPEG"))
    bad = whole.with_name("cut.JPEG")
    bad.write_bytes(whole.read_bytes()[:-800])
    program = run(
        *TINY, f"--data_path={data}", "--nproc_per_node=2", "--batch_size=2", f"--output_dir={output}", "--epochs=2"
    )
    assert program.status == 1
    assert f"cannot read image {bad} (class n01443537, train): truncated" in last_line(program)
    values = summary(output)
    assert values["status"] == "failed"
    assert str(bad) in values["error"]
    program.wait_until_gone(10)


def test_two_jobs_beside_a_taken_default_port(start, tmp_path):
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            taken.bind(("127.0.0.1", 29500))
            taken.listen()
        except OSError:
            pass  # somebody else holds it, which serves as well
        jobs = [
            start(*SHORT, "--nproc_per_node=2", f"--output_dir={tmp_path / 'out'}", name=f"job{number}")
            for number in range(2)
        ]
        assert [job.process.wait(120) for job in jobs] == [0, 0]
    assert len(list((tmp_path / "out").glob("*/*/summary.json"))) == 2


@pytest.mark.parametrize("module", ["torch.distributed.run", "torch.distributed.launch"])
def test_other_launchers(run, tmp_path, module):
    command = [sys.executable, "-m", module, "--nproc_per_node=2", f"--master_port={free_port()}", PROGRAM]
    program = run(*SHORT, f"--output_dir={tmp_path / 'out'}", command=command)
    assert program.status == 0, program.err.read_text()
    assert program.out.read_text().count("Final Performance") == 1
    assert summary(tmp_path / "out")["world_size"] == 2


def test_the_package_is_a_program_too(run):
    roots = f"{Path(PROGRAM).parent / 'DistributedResnet50'}:{Path(PROGRAM).parents[1]}"
    program = run("--data_path=/nonexistent", command=[sys.executable, "-m", "image_classification"], PYTHONPATH=roots)
    assert program.status == 2
    assert last_line(program).startswith("error: --data_path=/nonexistent: ")


def test_a_machine_that_waits_for_the_others_can_be_stopped(start, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"
    program = start(*SHORT, "--world_size=2", "--rank=0", f"--dist_url={url}", f"--output_dir={tmp_path / 'out'}")
    program.wait_for("training images in")
    time.sleep(3)  # into the wait, which prints nothing
    program.process.terminate()
    assert program.process.wait(20) == -signal.SIGTERM  # which a shell shows as 143
    program.wait_until_gone(10)


def test_two_machines_write_one_checkpoint(start, tmp_path):
    url = f"tcp://127.0.0.1:{free_port()}"
    machines = [
        start(*SHORT, "--world_size=2", f"--rank={rank}", f"--dist_url={url}", f"--output_dir={tmp_path / 'out'}",
              name=f"machine{rank}", GLOO_SOCKET_IFNAME="lo")
        for rank in range(2)
    ]  # fmt: skip
    assert [machine.process.wait(120) for machine in machines] == [0, 0], machines[1].err.read_text()
    assert len(list((tmp_path / "out").glob("*/*/checkpoint_last.pth.tar"))) == 1
    assert "Final" not in machines[1].out.read_text()
