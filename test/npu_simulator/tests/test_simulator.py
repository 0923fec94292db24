"""The simulated NPU, checked in processes of its own; checks/ has what they run."""

import importlib.util
import sys
import time

import pytest

REDUCE_TWICE = """
import torch, torch_npu, torch.distributed as dist
dist.init_process_group("hccl")
for step in range(2):
    dist.all_reduce(torch.ones(1, device="npu"))
    print("reduced", step, flush=True)
"""


def test_device(check_file):
    check_file("check_device.py")


def test_counters(check_file):
    check_file("check_counters.py")


def test_environment(check_file):
    check_file("check_environment.py")


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910B3"])
def test_generations(check_file, soc):
    check_file("check_generations.py", NPU_SIMULATOR_SOC=soc)


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910B3"])
def test_hccl(check_file_on_ranks, soc):
    check_file_on_ranks("check_hccl.py", NPU_SIMULATOR_SOC=soc, HCCL_EXEC_TIMEOUT="60")


@pytest.mark.skipif(importlib.util.find_spec("expecttest") is None, reason="torch.testing needs expecttest")
def test_operators(check_file):
    check_file("check_operators.py", timeout=600)


def test_port_taken(ranks):
    [(output, status)] = ranks("-c", REDUCE_TWICE, world_size=1, NPU_SIMULATOR_FAULT="port_taken")
    assert status == 1 and "EJ0003: Failed to bind the IP port" in output


def test_a_rank_that_times_out_while_the_other_waits(ranks):
    start = time.monotonic()
    fault = "collective_timeout:rank=1,collective=2,seconds=1"
    outputs = ranks("-c", REDUCE_TWICE, NPU_SIMULATOR_FAULT=fault, HCCL_EXEC_TIMEOUT="12")
    for output, status in outputs:
        assert status == 1 and "reduced 0" in output and "reduced 1" not in output
        assert "DistBackendError: EI0002" in output
    (waiting, _), (failing, _) = outputs
    assert "injected at collective 2" in failing and "injected" not in waiting
    assert time.monotonic() - start > 12  # it did not notice that the other was gone


COMPILER = """#!/bin/sh
# compiles nothing, links what is there already, and leaves a trace of it
for argument; do [ "$previous" = -o ] && output=$argument; previous=$argument; done
case " $* " in
    *" -c "*) : > "$output" ;;
    *" -shared "*) echo linked >> "{trace}"; cp "{library}" "$output" ;;
    *) exec c++ "$@" ;;
esac
"""


def test_processes_that_start_together_compile_once(python, ranks, tmp_path):
    library = python("-c", "import torch_npu; print(torch_npu._C.__file__)").stdout.strip()
    trace, compiler = tmp_path / "trace", tmp_path / "compiler"
    compiler.write_text(COMPILER.format(trace=trace, library=library))
    compiler.chmod(0o755)
    code = "import torch, torch_npu; print(torch.ones(3, device='npu').sum().item())"
    cache = str(tmp_path / "cache")
    outputs = ranks("-c", code, world_size=3, CXX=str(compiler), NPU_SIMULATOR_CACHE=cache)
    assert all(status == 0 and output.endswith("3.0\n") for output, status in outputs), outputs
    assert trace.read_text() == "linked\n"
    assert len(list((tmp_path / "cache").rglob("_C*.so"))) == 1


def test_this_process_stays_clean():
    assert "torch_npu" not in sys.modules
