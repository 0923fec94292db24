"""The example of docs/: a step of one's own."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLE = Path(__file__).resolve().parents[2] / "docs" / "clip_each_layer.py"


@pytest.fixture
def example(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(EXAMPLE.parent), *sys.path])
    import clip_each_layer

    return clip_each_layer


def test_it_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 40


def test_each_tensor_is_clipped_apart(example, make_state):
    state = make_state()
    for parameter in state.module.parameters():
        parameter.grad = torch.full_like(parameter, 0.5)
    state.module.fc.bias.grad.fill_(1e-4)
    example.clip_each_layer(state)
    norms = {name: parameter.grad.norm().item() for name, parameter in state.module.named_parameters()}
    assert norms.pop("fc.bias") == pytest.approx(1e-4 * 10**0.5, rel=1e-4)
    assert list(norms.values()) == pytest.approx([example.MAX_NORM] * len(norms), rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 2])
def test_it_trains(example, ranks, tmp_path):
    """Two ranks are processes, which import the step by its name."""
    flags = ("--data_path=synthetic", "--synthetic_images=16", "--num_classes=4", "--image_size=8", "--device=cpu",
             "--arch=resnet18", "--width_multiplier=0.125", "--batch_size=4", "--epochs=1",
             f"--nproc_per_node={ranks}")  # fmt: skip
    if ranks == 1:
        step_function = example.clipping_step
        assert example.main([*flags, f"--output_dir={tmp_path}"], step_function=step_function) == 0
    else:
        command = [sys.executable, str(EXAMPLE), *flags, f"--output_dir={tmp_path}"]
        assert subprocess.run(command, cwd=tmp_path, timeout=300, check=False).returncode == 0
    assert len(list(tmp_path.glob("*/*/checkpoint_last.pth.tar"))) == 1
