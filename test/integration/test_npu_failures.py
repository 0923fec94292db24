"""What an NPU run says when the machine fails it, and what it leaves: played by the simulated NPU."""

import importlib.util
import json
import re

import pytest

SIMULATED = ("--simulate_npu", "--data_path=digits", "--image_size=8", "--arch=resnet18", "--width_multiplier=0.125",
             "--batch_size=16", "--print_freq=1")  # fmt: skip
LONG, SHORT = "--epochs=100000", "--max_steps=2"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mmcv") is None, reason="mmcv 1.7.2 is not installed (test/setup_environment.py --mmcv)"
)


def last_line(program) -> str:
    return program.err.read_text().splitlines()[-1]


@pytest.mark.parametrize(
    ("num_ranks", "fault", "line"),
    [
        (1, "out_of_memory:bytes=5000000", "OutOfMemoryError: NPU out of memory. .*; take a smaller --batch_size"),
        (1, "dead_card:kernel=9000", "507046: waiting for the card timed out; look first at a hanging operator"),
        (2, "dead_card:kernel=9000,rank=1", r"\[rank 1\] 507046: waiting for the card timed out; look first at"),
        (2, "collective_timeout:rank=1,collective=20,seconds=2", r"\[rank 1\] EI0002: a collective waited too long"),
    ],
)
def test_a_failure_while_training(start, tmp_path, num_ranks, fault, line):
    """The other rank waits in C++ for 1836 seconds, as it would on the real machine; it is ended all the same."""
    batch = "--batch_size=256" if fault.startswith("out_of") else "--batch_size=16"  # the first step needs too much
    program = start(*SIMULATED, batch, LONG, f"--nproc_per_node={num_ranks}", f"--output_dir={tmp_path / 'out'}",
                    NPU_SIMULATOR_FAULT=fault)  # fmt: skip
    if not fault.startswith("out_of"):
        program.wait_for("Epoch: [0][", seconds=240)
    assert program.process.wait(240) == 1
    program.wait_until_gone(10)
    assert re.match(f"error: {line}", last_line(program)), last_line(program)
    (path,) = (tmp_path / "out").glob("*/*/summary.json")
    summary = json.loads(path.read_text())
    assert summary["status"] == "failed"
    assert summary["error"] in last_line(program)
    assert "Final" not in program.out.read_text()


@pytest.mark.parametrize(("num_ranks", "kind", "code"), [(1, "busy", "EJ0001"), (2, "port_taken", "EJ0003")])
def test_what_an_old_job_holds_is_tried_once_more(run, tmp_path, num_ranks, kind, code):
    program = run(*SIMULATED, SHORT, f"--nproc_per_node={num_ranks}", f"--output_dir={tmp_path / 'out'}",
                  NPU_SIMULATOR_FAULT=f"{kind}:once={tmp_path / 'once'}")  # fmt: skip
    assert program.status == 0, program.err.read_text()
    (told,) = [line for line in program.err.read_text().splitlines() if line.startswith(code)]
    assert told.endswith("; trying once more in 10 s")
    assert len(list((tmp_path / "out").glob("*/*"))) == 1


def test_what_an_old_job_still_holds_ends_the_run(run, tmp_path):
    program = run(*SIMULATED, SHORT, f"--output_dir={tmp_path / 'out'}", NPU_SIMULATOR_FAULT="busy")
    assert program.status == 1
    line = last_line(program)
    assert line.startswith("error: EJ0001: ")
    assert line.endswith("look first at an old job on this card: end it and wait 10 s")
    assert not (tmp_path / "out").exists()
    program.wait_until_gone(10)


def stub(folder, name: str, source: str) -> str:
    """A folder for PYTHONPATH with a package of this name and source."""
    package = folder / f"stub of {name}" / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(source)
    return str(package.parent)


def test_environments_that_cannot_carry_a_run(start, tmp_path):
    """All are started at once: each is a second or two of work after the imports."""
    symbol = stub(tmp_path, "torch_npu", "raise ImportError('libtorch_npu.so: undefined symbol: _ZN2at4name')")
    mmcv2 = stub(tmp_path, "mmcv", "__version__ = '2.1.0'")
    two = ("--nproc_per_node=2",)
    cases = [
        ((), {"ASCEND_RT_VISIBLE_DEVICES": "1,0"}, "ASCEND_RT_VISIBLE_DEVICES=1,0: is not a rising list"),
        ((), {"ASCEND_RT_VISIBLE_DEVICES": "0,99"}, "ASCEND_RT_VISIBLE_DEVICES=0,99: card 99 is not there"),
        ((), {"ASCEND_RT_VISIBLE_DEVICES": "a,b"}, "ASCEND_RT_VISIBLE_DEVICES=a,b: is not a rising list"),
        ((), {"NPU_SIMULATOR_FAULT": "no_libhccl"}, "torch_npu: cannot load (libhccl.so"),
        (two, {"PYTHONPATH": mmcv2}, "mmcv: needs mmcv 1.x for NPUDistributedDataParallel, found 2.1.0"),
        (two, {"HCCL_CONNECT_TIMEOUT": "5"}, "HCCL_CONNECT_TIMEOUT=5: must be from 120 to 7200"),
        (("--gpu=8",), {}, "--gpu=8: card 8 asked, 8 npu visible"),
    ]
    programs = [
        start(*SIMULATED, SHORT, *flags, f"--output_dir={tmp_path / 'out'}", name=f"case{number}", **variables)
        for number, (flags, variables, _) in enumerate(cases)
    ]
    cases.append(((), {}, "torch_npu: cannot load (libtorch_npu.so: undefined symbol"))
    programs.append(start("--device=npu", f"--output_dir={tmp_path / 'out'}", name="symbol", PYTHONPATH=symbol))
    for program, (_, _, expected) in zip(programs, cases, strict=True):
        assert program.process.wait(240) == 2, program.err.read_text()
        lines = program.err.read_text().splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith(f"error: {expected}")
        assert "; " in lines[0], "no remedy"
    assert not (tmp_path / "out").exists()


def test_two_jobs_have_ports_of_their_own(start, tmp_path):
    jobs = [start(*SIMULATED, LONG, "--nproc_per_node=2", f"--output_dir={tmp_path / 'out'}", name=f"job{number}")
            for number in range(2)]  # fmt: skip
    for job in jobs:
        job.wait_for("validation images")  # the last of the lines before the ranks are started
        job.process.terminate()
    assert [job.process.wait(60) for job in jobs] == [143, 143]
    ports = [re.search(r"^HCCL_IF_BASE_PORT=(\d+)", job.out.read_text(), re.MULTILINE)[1] for job in jobs]
    assert ports[0] != ports[1]
    for job in jobs:
        job.wait_until_gone(30)
