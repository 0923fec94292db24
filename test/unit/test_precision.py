import pytest
import torch

from image_classification import precision as module
from image_classification.config import PrecisionConfig
from image_classification.precision import Precision

CPU = torch.device("cpu")


def linear_with(level, monkeypatch=None, half=None):
    """A linear layer, its optimizer and the precision; `half` replaces the device's short type."""
    if half is not None:
        monkeypatch.setattr(module, "half_type", lambda _: half)
    torch.manual_seed(0)
    layer = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    return layer, optimizer, Precision(PrecisionConfig(opt_level=level), optimizer, CPU)


@pytest.mark.parametrize(("level", "dtype"), [("O0", torch.float32), ("O1", torch.bfloat16)])
def test_the_type_of_the_forward_pass_on_the_cpu(level, dtype):
    layer, _, precision = linear_with(level)
    with precision.autocast():
        assert layer(torch.ones(3, 4)).dtype == dtype
    assert precision.compute_type == dtype
    assert layer(torch.ones(3, 4)).dtype == torch.float32
    assert layer.weight.dtype == torch.float32
    assert precision.loss_scale == 1.0


def test_o0_switches_an_outer_autocast_off():
    layer, _, precision = linear_with("O0")
    with torch.autocast("cpu", dtype=torch.bfloat16), precision.autocast():
        assert layer(torch.ones(3, 4)).dtype == torch.float32


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_step_without_scaling_is_the_optimizers(level):
    layer, _, precision = linear_with(level)
    twin, optimizer, _ = linear_with(level)
    precision.backward(layer(torch.ones(3, 4)).sum())
    twin(torch.ones(3, 4)).sum().backward()
    assert torch.equal(layer.weight.grad, twin.weight.grad)
    assert precision.step() is True
    optimizer.step()
    assert torch.equal(layer.weight, twin.weight)


def test_float16_scales_the_loss_and_unscales_the_gradients(monkeypatch):
    layer, _, precision = linear_with("O1", monkeypatch, torch.float16)
    twin, optimizer, _ = linear_with("O0")
    precision.backward(layer(torch.ones(3, 4)).sum())
    twin(torch.ones(3, 4)).sum().backward()
    assert precision.loss_scale == 65536.0
    torch.testing.assert_close(layer.weight.grad, twin.weight.grad * 65536)
    assert precision.step() is True
    optimizer.step()
    torch.testing.assert_close(layer.weight, twin.weight)


def test_an_overflow_skips_the_update_and_lowers_the_scale(monkeypatch):
    layer, optimizer, precision = linear_with("O1", monkeypatch, torch.float16)
    before = layer.weight.detach().clone()
    precision.backward(layer(torch.ones(3, 4)).sum() * float("inf"))
    assert precision.step() is False
    assert torch.equal(layer.weight, before)
    assert precision.loss_scale == 32768.0
    optimizer.zero_grad()
    precision.backward(layer(torch.ones(3, 4)).sum())
    assert precision.step() is True
    assert not torch.equal(layer.weight, before)
    assert precision.loss_scale == 32768.0


def test_the_scale_is_restored(monkeypatch):
    layer, _, precision = linear_with("O1", monkeypatch, torch.float16)
    precision.backward(layer(torch.ones(3, 4)).sum() * float("inf"))
    precision.step()
    _, _, resumed = linear_with("O1", monkeypatch, torch.float16)
    resumed.load_state_dict(precision.state_dict())
    assert resumed.loss_scale == 32768.0
    assert resumed.state_dict() == precision.state_dict()


def test_the_state_of_another_level_is_no_error(monkeypatch):
    unscaled, scaled = linear_with("O0")[2], linear_with("O1", monkeypatch, torch.float16)[2]
    unscaled.load_state_dict(scaled.state_dict())
    assert unscaled.loss_scale == 1.0
    scaled.load_state_dict(unscaled.state_dict())
    assert scaled.loss_scale == 65536.0


def test_two_optimizers_do_not_count_each_other():
    layer, optimizer, precision = linear_with("O0")
    other_layer, _, other = linear_with("O0")
    for _ in range(3):
        precision.backward(layer(torch.ones(3, 4)).sum())
        precision.step()
    other.backward(other_layer(torch.ones(3, 4)).sum())
    assert other.step() is True
