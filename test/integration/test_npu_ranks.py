"""Two ranks on the simulated NPU, of either generation: what npu_ranks.py saw."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PATHS = (REPOSITORY / "test" / "npu_simulator", REPOSITORY / "ResNet50_for_PyTorch" / "DistributedResnet50", REPOSITORY)
PRINT_FREQ, STEPS_PER_EPOCH = 3, 6

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mmcv") is None, reason="mmcv 1.7.2 is not installed (test/setup_environment.py --mmcv)"
)


@pytest.fixture(scope="module", params=["Ascend910A", "Ascend910B3"])
def soc(request):
    return request.param


@pytest.fixture(scope="module")
def ranks(soc, tmp_path_factory) -> list[dict]:
    """What each of two ranks saw on this chip."""
    folder = tmp_path_factory.mktemp(soc)
    changes = {
        "NPU_SIMULATOR_SOC": soc,
        "HCCL_EXEC_TIMEOUT": "60",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(map(str, PATHS)),
    }
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    command = [*torchrun, str(Path(__file__).with_name("npu_ranks.py")), str(folder)]
    done = subprocess.run(command, cwd=folder, env=os.environ | changes, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_hccl_and_the_wrapper_of_mmcv_are_used(ranks):
    for seen in ranks:
        assert seen["backend"] == "hccl"
        assert seen["forwards"] == 2 * STEPS_PER_EPOCH + 1  # and the discarded one


@pytest.mark.parametrize("opt_level", ["O0", "O1", "O2"])
def test_parameters_are_equal_after_every_epoch(ranks, opt_level):
    for seen in ranks:
        assert seen[opt_level]["differences"] == [0, 0]
        assert seen[opt_level]["moved"] > 0.01


def test_two_ranks_equal_one_with_both_batches(ranks):
    for seen in ranks:
        assert seen["difference from one rank"] <= 1e-6


def is_logged(step: dict) -> bool:
    return (step["step"] - 1) % STEPS_PER_EPOCH + 1 in (PRINT_FREQ, STEPS_PER_EPOCH)


@pytest.mark.parametrize("level", ["O0", "bfloat16"])
def test_without_a_scaler_nothing_is_read_between_log_lines(ranks, soc, level):
    if (soc, level) == ("Ascend910A", "bfloat16"):
        pytest.skip("the first generation has no bfloat16")
    for rank, seen in enumerate(ranks):
        steps = seen[level]["steps"]
        assert len(steps) == 2 * (STEPS_PER_EPOCH - 1)
        for step in steps:
            assert step["training"]["kernels"] > 100
            assert step["training"]["collectives"] >= 1
            assert step["training"]["blocking_host_to_device_copies"] == 0, step
            # With a log line every rank reads whether a loss was not finite, in one number.
            assert (step["training"]["host_reads"], step["training"]["synchronizations"]) == (is_logged(step), 0), step
            if not is_logged(step):
                assert (step["report"]["host_reads"], step["report"]["synchronizations"]) == (0, 0), step
        reads = [step["report"]["host_reads"] for step in steps if is_logged(step)]
        assert all(reads) if rank == 0 else not any(reads)


def test_with_a_scaler_only_its_own_decision_is_read(ranks, soc):
    for seen in ranks:
        alone = seen["scaler alone"]
        assert (alone["host_reads"], alone["synchronizations"]) == (3 if soc == "Ascend910A" else 1, 0)
        for step in [*seen["O1"]["steps"], *seen["O2"]["steps"]]:
            training = step["training"]
            assert training["synchronizations"] == 0
            assert training["host_reads"] == alone["host_reads"], step
            if not is_logged(step):
                assert (step["report"]["host_reads"], step["report"]["synchronizations"]) == (0, 0)


def test_the_scaler_fits_the_chip(ranks, soc):
    assert all(seen["torch_npu's scaler"] == (soc == "Ascend910A") for seen in ranks)


def test_an_overflow_on_one_rank_skips_one_step_on_all(ranks):
    for seen in ranks:
        before, overflow, after = seen["overflow"]
        assert (before["updated"], overflow["updated"], after["updated"]) == (True, False, True)
        assert (before["scale_factor"], overflow["scale_factor"], after["scale_factor"]) == (1, 0.5, 1)
        assert all(step["finite"] and step["difference"] == 0 for step in seen["overflow"])


def test_scaler_states_move_between_the_kinds(ranks):
    for seen in ranks:
        assert seen["loaded scales"] == {"torch": 1024, "torch_npu": 512}
