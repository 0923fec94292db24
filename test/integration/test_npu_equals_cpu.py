"""A run on the simulated NPU equals the CPU's bit for bit, and its checkpoints are everybody's."""

import importlib.util
import json
from pathlib import Path

import pytest
import torch
import torchvision

from image_classification.launch import main

COMMON = ("--data_path=digits", "--image_size=8", "--arch=resnet18", "--width_multiplier=0.125", "--max_steps=6",
          "--seed=3", "--opt_level=O0", "--channels_last=False", "--print_freq=3", "--workers=0")  # fmt: skip

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mmcv") is None, reason="mmcv 1.7.2 is not installed (test/setup_environment.py --mmcv)"
)


def read(output: Path) -> tuple[dict, dict, Path]:
    """The checkpoint, the summary and the path of the checkpoint of the one run below `output`."""
    (folder,) = output.glob("*/*")
    path = folder / "checkpoint_last.pth.tar"
    checkpoint = torch.load(path, map_location="cpu", weights_only=True)
    return checkpoint, json.loads((folder / "summary.json").read_text()), path


@pytest.fixture(scope="module")
def on_the_cpu(tmp_path_factory):
    """Runs the program on the CPU in this process with one thread; gives the folder of its output."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    output = tmp_path_factory.mktemp("cpu")
    assert main([*COMMON, "--batch_size=32", "--device=cpu", f"--output_dir={output}"]) == 0
    yield output
    torch.set_num_threads(threads)


def assert_same_run(npu: Path, cpu: Path) -> None:
    (npu_checkpoint, npu_summary, _), (cpu_checkpoint, cpu_summary, _) = read(npu), read(cpu)
    assert (npu_summary["device_type"], cpu_summary["device_type"]) == ("npu", "cpu")
    for key in ("model", "optimizer", "step", "best", "plan"):
        torch.testing.assert_close(npu_checkpoint[key], cpu_checkpoint[key], rtol=0, atol=0, msg=key)
    assert npu_checkpoint["step"] == 6
    for name in ("final_val_loss", "final_train_loss", "final_top1_percent", "final_top5_percent"):
        assert npu_summary[name] == cpu_summary[name]


@pytest.mark.parametrize("soc", ["Ascend910A", "Ascend910B3"])
def test_one_rank(run, on_the_cpu, capsys, tmp_path, soc):
    output = tmp_path / "npu"
    program = run(*COMMON, "--batch_size=32", "--simulate_npu", f"--output_dir={output}", NPU_SIMULATOR_SOC=soc)
    assert program.status == 0, program.err.read_text()
    assert_same_run(output, on_the_cpu)
    _, summary, path = read(output)
    assert summary["device_name"] == soc
    assert main(["--evaluate", f"--resume={path}", f"--output_dir={tmp_path / 'cpu'}", "--device=cpu"]) == 0
    assert f"Acc@1 {summary['final_top1_percent']:.3f} " in capsys.readouterr().out


def test_two_ranks(start, tmp_path):
    two = ("--batch_size=16", "--nproc_per_node=2")
    npu, cpu = (
        start(*COMMON, *two, device, f"--output_dir={tmp_path / device}", name=f"on {device}")
        for device in ("--simulate_npu", "--device=cpu")
    )
    assert [program.process.wait(300) for program in (npu, cpu)] == [0, 0], npu.err.read_text()
    assert_same_run(tmp_path / "--simulate_npu", tmp_path / "--device=cpu")


def test_checkpoint_of_the_cpu_on_the_npu(run, on_the_cpu, tmp_path):
    _, summary, path = read(on_the_cpu)
    program = run("--evaluate", f"--resume={path}", "--simulate_npu", "--device=npu", f"--output_dir={tmp_path}/out")
    assert program.status == 0, program.err.read_text()
    assert f"Acc@1 {summary['final_top1_percent']:.3f} " in program.out.read_text()
    (folder,) = (tmp_path / "out").glob("*/*")
    assert json.loads((folder / "summary.json").read_text())["val_loss"] == summary["final_val_loss"]


def test_weights_of_the_npu_are_torchvisions(run, tmp_path):
    """One step of the real width; loaded strictly, the network gives what torchvision's gives."""
    flags = ("--data_path=synthetic", "--synthetic_images=16", "--num_classes=10", "--image_size=32", "--arch=resnet18",
             "--stem=imagenet", "--batch_size=8", "--max_steps=1", "--simulate_npu")  # fmt: skip
    program = run(*flags, f"--output_dir={tmp_path / 'out'}")
    assert program.status == 0, program.err.read_text()
    checkpoint, _, _ = read(tmp_path / "out")
    network = torchvision.models.resnet18(num_classes=10)
    before = network.conv1.weight.clone()
    network.load_state_dict(checkpoint["model"], strict=True)
    assert not torch.equal(before, network.conv1.weight)
    assert network.eval()(torch.zeros(1, 3, 32, 32)).isfinite().all()
