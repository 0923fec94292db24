"""The adapter for Apex on the simulated NPU, with the double of Apex in its place: what apex_run.py saw."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from image_classification.launch import main

REPOSITORY = Path(__file__).resolve().parents[2]
DOUBLE = REPOSITORY / "test" / "apex_double"
PROGRAM = REPOSITORY / "ResNet50_for_PyTorch" / "pytorch_resnet50_apex.py"
PATHS = (
    REPOSITORY / "test" / "npu_simulator",
    DOUBLE,
    REPOSITORY / "ResNet50_for_PyTorch" / "DistributedResnet50",
    REPOSITORY,
)
CHIPS = {"Ascend910B3": ("O1", "O2", "O3"), "Ascend910A": ("O1", "O2")}
LEVELS = [(soc, level) for soc, levels in CHIPS.items() for level in levels]
SCALED = [(soc, level) for soc, level in LEVELS if level != "O3"]
SMALL = ("--data_path=digits", "--image_size=8", "--arch=resnet18", "--width_multiplier=0.125")


def call(command: list, folder: Path, paths: tuple[Path, ...], **variables: str) -> subprocess.CompletedProcess:
    changes = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(map(str, paths))} | variables
    done = subprocess.run([sys.executable, *map(str, command)], cwd=folder, env=os.environ | changes,
                          capture_output=True, text=True, timeout=600, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done


@pytest.fixture(scope="module")
def seen(tmp_path_factory) -> dict[str, dict]:
    """What one process saw, by chip."""
    found = {}
    for soc in CHIPS:
        folder = tmp_path_factory.mktemp(soc)
        call([Path(__file__).with_name("apex_run.py"), folder], folder, PATHS, NPU_SIMULATOR_SOC=soc)
        found[soc] = json.loads((folder / "rank0.json").read_text())
    return found


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("soc", "level"), LEVELS)
def test_what_apex_is_asked_for(seen, soc, level, micro_batches):
    (first, options), *others = seen[soc]["calls"][f"{level} {micro_batches}"]
    assert (first, options["opt_level"], options["min_loss_scale"]) == ("initialize", level, 1)
    assert options["loss_scale"] == (1 if level == "O3" else "dynamic")
    norms, masters, combined = {"O1": (None, None, True), "O2": (True, True, True), "O3": (False, False, None)}[level]
    assert (options["keep_batchnorm_fp32"], options["master_weights"], options["combine_grad"]) == (
        norms,
        masters,
        combined,
    )
    delays = [soc == "Ascend910B3"] * (micro_batches - 1) + [False]
    step = [*(["scale_loss", {"delay_unscale": delay}] for delay in delays), ["step", {}]]
    assert others == 2 * step


@pytest.mark.parametrize("soc", CHIPS)
def test_with_a_static_scale_no_flag_is_read_and_every_chip_can_delay(seen, soc):
    delays = [options["delay_unscale"] for name, options in seen[soc]["static calls"] if name == "scale_loss"]
    assert delays == 2 * [True, True, False]


@pytest.mark.parametrize(("soc", "level"), LEVELS)
def test_ten_steps_leave_float32_weights_that_anybody_can_use(seen, soc, level):
    run = seen[soc]["ten"][level]
    assert len(run["steps"]) == 10 and run["steps"][-1]["skipped"] <= 2
    assert all((step["moved"] > 0.001) == (step["in_a_row"] == 0) for step in run["steps"])
    assert run["finite"] and run["types"] == ["torch.float32", "torch.int64"]
    assert run["from_masters"] == 0
    assert (run["from_own"] > 0) == (level == "O2")  # the network has them rounded
    assert run["logits"] == ["torch.float32", pytest.approx(0, abs=1e-5)]
    assert run["fused"] == ("SGD" if level == "O3" else "NpuFusedSGD")


@pytest.mark.parametrize(("micro_batches", "steps"), [(1, 10), (3, 4)])
@pytest.mark.parametrize("soc", CHIPS)
def test_both_engines_train_alike_with_the_same_scale(seen, soc, micro_batches, steps):
    by_apex, by_torch = (
        [step["loss"] for step in seen[soc]["static"][f"{engine} {micro_batches}"]] for engine in ("apex", "torch")
    )
    assert len(by_apex) == steps
    assert by_apex == pytest.approx(by_torch, abs=1e-2)


@pytest.mark.parametrize("soc", CHIPS)
def test_a_static_scale_finds_no_overflow_and_hands_on_no_endless_counter(seen, soc):
    static = seen[soc]["static"]
    assert static["skips_overflows"] is False
    assert (static["state"]["scale"], static["state"]["_growth_tracker"]) == (128, 0)


@pytest.mark.parametrize("where", ["alone", "first of three", "last of three"])
@pytest.mark.parametrize(("soc", "level"), SCALED)
def test_an_overflow_skips_its_step_and_halves_the_scale(seen, soc, level, where):
    steps = seen[soc]["overflow"][level][where]
    bad = 2 if where == "alone" else 1
    for number, step in enumerate(steps):
        assert (step["moved"] == 0) == (number == bad)
        assert step["scale_factor"] == (0.5 if number == bad else 1)
        assert (step["skipped"], step["in_a_row"]) == (int(number >= bad), int(number == bad))


@pytest.mark.parametrize(("soc", "level"), SCALED)
def test_twenty_overflows_in_a_row_are_counted_and_the_scale_stays_at_one(seen, soc, level):
    *overflows, after = seen[soc]["overflow"][level]["twenty"]
    assert [step["in_a_row"] for step in overflows] == list(range(1, 21))
    assert [step["scale"] for step in overflows] == [4, 2, *[1] * 18]
    assert all(step["moved"] == 0 for step in overflows)
    assert (after["in_a_row"], after["skipped"]) == (0, 20) and after["moved"] > 0


@pytest.mark.parametrize(("soc", "level"), LEVELS)
def test_a_resumed_run_equals_the_uninterrupted_one(seen, soc, level):
    run = seen[soc]["resume"][level]
    assert run["events"] == ["initialize"] + ["load_state_dict", "state_dict"] * (level != "O3")
    assert (run["step"], run["weights_at_5"], run["weights_at_10"]) == (5, 0, 0)
    assert [step["loss"] for step in run["again"]] == [step["loss"] for step in run["straight"]]


@pytest.mark.parametrize(("soc", "level"), LEVELS)
def test_checkpoints_move_between_the_engines(seen, soc, level):
    run = seen[soc]["resume"][level]
    assert (run["weights_by_torch"], run["weights_back"]) == (0, 0)
    assert [step["loss"] for step in run["by_torch"]] == pytest.approx(
        [step["loss"] for step in run["straight"]], abs=0.01
    )
    at_five, at_ten = ([512, 3], [512, 8]) if level != "O3" else ([None, None], [None, None])
    assert run["states"] == [at_five, at_five, at_five, at_ten, at_ten]


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize(("soc", "level"), SCALED)
def test_clipping_sees_the_true_norm(seen, soc, level, optimizer):
    run = seen[soc]["clip"][f"{level} {optimizer}"]
    assert run["norms"] == pytest.approx([run["true"], run["true"] / 2], rel=0.01)
    assert run["fused"] == (optimizer == "sgd")


@pytest.fixture(scope="module", params=CHIPS)
def ranks(request, tmp_path_factory) -> list[dict]:
    """What each of two ranks saw on this chip."""
    if importlib.util.find_spec("mmcv") is None:
        pytest.skip("mmcv 1.7.2 is not installed (test/setup_environment.py --mmcv)")
    folder = tmp_path_factory.mktemp("ranks")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    script = Path(__file__).with_name("apex_run.py")
    call([*torchrun, script, folder], folder, PATHS, NPU_SIMULATOR_SOC=request.param, HCCL_EXEC_TIMEOUT="60")
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(2)]


def test_two_ranks_stay_together(ranks):
    for rank in ranks:
        assert rank["events"] == ["initialize", "wrap"]
        assert (rank["wrapper"], rank["combines"]) == ("NPUDistributedDataParallel", True)
        assert rank["apart"] == [0] * 5


def test_an_overflow_on_one_rank_skips_the_step_on_both(ranks):
    for rank in ranks:
        assert [step["moved"] == 0 for step in rank["overflow"]] == [False, True, False]
        assert [step["scale_factor"] for step in rank["overflow"]] == [1, 0.5, 1]
        assert rank["apart after overflow"] == 0


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_two_ranks_equal_one_that_has_all_micro_batches(ranks, optimizer, micro_batches):
    for rank in ranks:
        run = rank["against one"][f"{optimizer} {micro_batches}"]
        assert run["apart"] == 0
        assert run["from_one"] < 0.01 * run["moved"]


def test_the_program_says_that_it_is_apex_and_its_checkpoint_scores_the_same_on_the_cpu(tmp_path, capsys):
    output = tmp_path / "output"
    options = ["--opt_level=O2", "--max_steps=6", "--batch_size=32", f"--output_dir={output}"]
    done = call([PROGRAM, "--simulate_npu", *SMALL, *options], tmp_path, (DOUBLE,))
    assert re.search(r"^precision O2: .* loss scale dynamic; by apex, memory", done.stdout, re.MULTILINE), done.stdout
    (folder,) = output.glob("*/*")
    accuracy = json.loads((folder / "summary.json").read_text())["final_top1_percent"]
    resume = f"--resume={folder / 'checkpoint_last.pth.tar'}"
    assert main(["--evaluate", resume, f"--output_dir={tmp_path / 'cpu'}", "--device=cpu"]) == 0
    assert f"Acc@1 {accuracy:.3f} " in capsys.readouterr().out


def test_another_package_called_apex_is_recognised(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "apex.py").write_text('raise ImportError("pyramid")\n')
    options = ["--device=cpu", "--opt_level=O1", "--max_steps=1", "--batch_size=32", f"--output_dir={tmp_path}/output"]
    done = call([PROGRAM, *SMALL, *options], tmp_path, (tmp_path / "other",))
    assert "by torch (found a different package called apex" in done.stdout
