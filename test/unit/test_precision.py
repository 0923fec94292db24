"""torch's engine: what a step does at each level, by a linear layer and by loops written here by hand."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from image_classification.config import PrecisionConfig
from image_classification.precision import make_precision
from image_classification.resnet import build_resnet
from image_classification.training import train_step

CPU = torch.device("cpu")
FLOAT16, BFLOAT16 = {"half_type": "float16"}, {"half_type": "bfloat16"}


def linear_with(level, **options):
    """A linear layer and the precision it is on."""
    torch.manual_seed(0)
    layer = nn.Linear(4, 2)
    config = PrecisionConfig(opt_level=level, **options)
    return layer, make_precision(config, layer, torch.optim.SGD(layer.parameters(), lr=0.1), CPU)


def one_step(layer, precision, factor=1.0) -> bool:
    precision.backward(precision.forward(layer, torch.ones(3, 4)).float().sum() * factor)
    precision.unscale()
    updated = precision.step()
    precision.zero_gradients()
    return updated


@pytest.mark.parametrize(("level", "dtype"), [("O0", torch.float32), ("O1", torch.bfloat16), ("O2", torch.bfloat16)])
def test_the_type_of_the_forward_pass_on_the_cpu(level, dtype):
    layer, precision = linear_with(level)
    assert precision.forward(layer, torch.ones(3, 4)).dtype == dtype
    assert precision.level.compute_type == dtype
    assert precision.loss_scale == 1.0


@pytest.mark.parametrize("level", ["O0", "O2"])
def test_only_o1_computes_by_autocast(level):
    layer, precision = linear_with(level)
    with torch.autocast("cpu", dtype=torch.float16):
        assert precision.forward(layer, torch.ones(3, 4)).dtype == precision.level.parameter_type


@pytest.mark.parametrize("level", ["O0", "O1"])
def test_a_step_without_scaling_is_the_optimizers(level):
    layer, precision = linear_with(level)
    twin, _ = linear_with(level)
    assert one_step(layer, precision) is True
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=level == "O1"):
        twin(torch.ones(3, 4)).float().sum().backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert torch.equal(layer.weight, twin.weight)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_float16_scales_the_loss_and_unscales_the_gradients(level):
    layer, precision = linear_with(level, **FLOAT16)
    assert precision.loss_scale == 65536.0
    assert one_step(layer, precision, factor=0.125) is True
    twin, plain = linear_with("O0")
    assert one_step(twin, plain, factor=0.125) is True
    for name, value in precision.weights().items():
        torch.testing.assert_close(value, plain.weights()[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_an_overflow_skips_the_update_and_halves_the_scale(level):
    layer, precision = linear_with(level, **FLOAT16)
    before = {name: value.clone() for name, value in precision.weights().items()}
    assert one_step(layer, precision, float("inf")) is False
    assert precision.loss_scale == 32768.0
    assert (precision.skipped_updates, precision.skips_in_a_row) == (1, 1)
    assert all(torch.equal(before[name], value) for name, value in precision.weights().items())
    precision.load_state_dict({"scale": 1024.0})
    assert one_step(layer, precision) is True
    assert (precision.skipped_updates, precision.skips_in_a_row) == (1, 0)
    assert not torch.equal(before["weight"], precision.weights()["weight"])
    assert precision.loss_scale == 1024.0


def test_the_dynamic_scale_doubles_after_2000_good_steps():
    layer, precision = linear_with("O1", **FLOAT16)
    precision.load_state_dict({"scale": 8.0, "_growth_tracker": 1998})
    one_step(layer, precision)
    assert precision.loss_scale == 8.0
    one_step(layer, precision)
    assert precision.loss_scale == 16.0


def test_the_dynamic_scale_never_falls_below_one():
    layer, precision = linear_with("O1", **FLOAT16)
    scales = []
    for _ in range(19):
        assert one_step(layer, precision, float("nan")) is False
        scales.append(precision.loss_scale)
    assert scales[:16] == [2.0**power for power in range(15, -1, -1)]
    assert scales[16:] == [1.0, 1.0, 1.0]
    assert precision.skips_in_a_row == 19


def test_a_static_scale_stays_whatever_happens():
    layer, precision = linear_with("O2", loss_scale="128", **FLOAT16)
    assert one_step(layer, precision) is True
    assert one_step(layer, precision, float("inf")) is False
    precision.load_state_dict({"scale": 4096.0, "_growth_tracker": 5})
    assert one_step(layer, precision) is True
    assert precision.loss_scale == 128.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_scale_and_growth_counter_are_restored(level):
    layer, precision = linear_with(level, **FLOAT16)
    one_step(layer, precision, float("inf"))
    precision.load_state_dict(precision.state_dict() | {"scale": 1024.0})
    one_step(layer, precision)
    _, resumed = linear_with(level, **FLOAT16)
    assert resumed.load_state_dict(precision.state_dict()) is None
    assert resumed.state_dict() == precision.state_dict()
    assert (resumed.loss_scale, resumed.state_dict()["_growth_tracker"]) == (1024.0, 1)


def test_the_state_of_another_level_is_no_error():
    unscaled, scaled = linear_with("O0")[1], linear_with("O1", **FLOAT16)[1]
    assert unscaled.load_state_dict(scaled.state_dict()) is None
    assert unscaled.loss_scale == 1.0
    assert "no loss scale: it starts at 65536" in scaled.load_state_dict(unscaled.state_dict())


def test_two_optimizers_do_not_count_each_other():
    (layer, precision), (other_layer, other) = linear_with("O0"), linear_with("O0")
    for _ in range(3):
        one_step(layer, precision)
    assert one_step(other_layer, other) is True


def test_clipping_sees_gradients_without_the_scale():
    layer, precision = linear_with("O2", loss_scale="64", **FLOAT16)
    before = precision.weights()["weight"].clone()
    precision.backward(precision.forward(layer, torch.ones(3, 4)).float().sum())
    precision.unscale()
    norm = torch.stack([p.grad.norm() for group in precision.optimizer.param_groups for p in group["params"]]).norm()
    assert norm.item() == pytest.approx((8 * 9 + 2 * 9) ** 0.5, rel=1e-3)
    precision.clip_gradients(0.5)
    precision.step()
    moved = (precision.weights()["weight"] - before).norm().item()
    assert moved == pytest.approx(0.1 * 0.5 * (8 / 10) ** 0.5, rel=1e-3)


def test_masters_are_the_float32_weights_that_the_run_started_from():
    plain, _ = linear_with("O0")
    layer, precision = linear_with("O2")
    assert torch.equal(precision.weights()["weight"], plain.weight)
    assert torch.equal(layer.weight, plain.weight.bfloat16())
    one_step(layer, precision)
    assert torch.equal(layer.weight, precision.weights()["weight"].bfloat16())
    assert layer.weight.grad is None


def test_frozen_weights_are_saved_as_they_were():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    network[0].requires_grad_(False)
    before = network[0].weight.clone()
    precision = make_precision(PrecisionConfig(opt_level="O2"), network,
                               torch.optim.SGD(network[1].parameters(), lr=0.1), CPU)  # fmt: skip
    one_step(network, precision)
    assert network[0].weight.dtype == torch.bfloat16
    assert torch.equal(precision.weights()["0.weight"], before)


def test_what_is_validated_is_what_is_saved():
    layer, precision = linear_with("O2")
    one_step(layer, precision)
    images, weights = torch.ones(3, 4), precision.weights()
    logits = precision.infer(weights, images)
    assert logits.dtype == torch.float32
    assert torch.equal(logits, F.linear(images, weights["weight"], weights["bias"]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert precision.infer(weights, images).dtype == torch.float32


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125)


def batches(num_steps):
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        yield torch.randn(8, 3, 8, 8, generator=generator), torch.randint(10, (8,), generator=generator)


def reference_o2(half, overflow_at=(), steps=20, lr=0.02, momentum=0.9, weight_decay=1e-4):
    """O2 as a loop by hand: masters, a static scale, skipped overflows, SGD with momentum; no code of the package."""
    network, scale = small_network(), 1024.0 if half == torch.float16 else 1.0
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    exempt = {id(p) for module in norms for p in module.parameters()} | {id(network.fc.bias)}
    masters = [parameter.detach().clone() for parameter in network.parameters()]
    decays = [0.0 if id(parameter) in exempt else weight_decay for parameter in network.parameters()]
    buffers, losses, skipped = [None] * len(masters), [], []
    for module in network.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            module.to(half)
    for step, (images, labels) in enumerate(batches(steps)):
        loss = F.cross_entropy(network(images.to(half)).float(), labels)
        losses.append(loss.item())
        (loss * scale * (float("inf") if step in overflow_at else 1.0)).backward()
        gradients = [parameter.grad.float() / scale for parameter in network.parameters()]
        network.zero_grad()
        if not all(gradient.isfinite().all() for gradient in gradients):
            skipped.append(step)
            continue
        for place, (master, gradient) in enumerate(zip(masters, gradients, strict=True)):
            # With the roundings of torch's SGD: so ill-conditioned a network makes percents of a last bit.
            gradient = gradient.add(master, alpha=decays[place])
            buffers[place] = gradient if buffers[place] is None else buffers[place].mul(momentum).add(gradient)
            master.add_(buffers[place], alpha=-lr)
        for parameter, master in zip(network.parameters(), masters, strict=True):
            parameter.data.copy_(master)
    return losses, skipped, masters


@pytest.mark.parametrize(("half", "overflow_at"), [("bfloat16", ()), ("float16", ()), ("float16", (3, 4, 11))], ids=str)
def test_o2_equals_a_master_weight_loop_by_hand(make_state, half, overflow_at):
    static = {"loss_scale": "1024"} if half == "float16" else {}
    state = make_state(precision=PrecisionConfig(opt_level="O2", half_type=half, **static), schedule=lambda step: 0.02)
    factor, backward = 1.0, state.precision.backward
    state.precision.backward = lambda loss, last: backward(loss * factor, last)
    losses, skipped = [], []
    for step, batch in enumerate(batches(20)):
        factor = float("inf") if step in overflow_at else 1.0
        before = state.precision.skipped_updates
        losses.append(train_step(state, [batch]).averages().loss)
        if state.precision.skipped_updates > before:
            skipped.append(step)
    expected, expected_skips, masters = reference_o2(getattr(torch, half), overflow_at)
    assert skipped == expected_skips == list(overflow_at)
    assert losses == pytest.approx(expected, abs=1e-3)
    weights = state.precision.weights()
    for (name, _), master in zip(state.module.named_parameters(), masters, strict=True):
        torch.testing.assert_close(weights[name], master, rtol=0, atol=1e-3, msg=name)
