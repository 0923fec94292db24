import pytest
import torch
from torch import nn

from image_classification.ema import WeightAverage


def series(num_steps, dtype=torch.float32):
    """Weights of a run: one tensor of two dimensions, one norm statistic, one counter."""
    generator = torch.Generator().manual_seed(0)
    for step in range(num_steps + 1):
        yield {
            "conv.weight": torch.randn(2, 3, generator=generator).to(dtype),
            "bn.num_batches_tracked": torch.tensor(step),
            "bn.running_mean": torch.randn(4, generator=generator),
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("decay", [0.5, 0.99])
def test_fifty_updates_are_the_weighted_sum(decay, dtype):
    values = list(series(50, dtype))
    average = WeightAverage(values[0], decay)
    for step, value in enumerate(values[1:]):
        average.update(value, step)
    decays = [min(decay, (1 + step) / (10 + step)) for step in range(50)]
    # Value i entered with 1 - d_i and was multiplied by every later d.
    shares = [torch.tensor(decays).double().prod().item()]
    shares += [(1 - decays[i]) * torch.tensor(decays[i + 1 :]).double().prod().item() for i in range(50)]
    assert sum(shares) == pytest.approx(1)
    for name in ("conv.weight", "bn.running_mean"):
        expected = sum(share * value[name].double() for share, value in zip(shares, values, strict=True))
        assert average.weights[name].dtype == torch.float32
        torch.testing.assert_close(average.weights[name].double(), expected, rtol=0, atol=1e-5)
    assert average.weights["bn.num_batches_tracked"].item() == 50


@pytest.mark.parametrize(("step", "decay"), [(0, 0.1), (8, 0.5), (80, 0.9), (10_000, 0.9)])
def test_the_decay_rises_to_the_one_asked_for(step, decay):
    average = WeightAverage({"w": torch.tensor([1.0])}, 0.9)
    average.update({"w": torch.tensor([0.0])}, step)
    assert average.weights["w"].item() == pytest.approx(decay)


def test_starts_at_the_weights_and_never_touches_them():
    weights = next(series(0))
    before = {name: value.clone() for name, value in weights.items()}
    average = WeightAverage(weights, 0.9)
    assert list(average.weights) == list(weights)
    assert all(torch.equal(average.weights[name], weights[name]) for name in weights)
    average.update({name: value + 1 for name, value in weights.items()}, 0)
    assert all(torch.equal(before[name], weights[name]) for name in weights)
    assert not torch.equal(average.weights["conv.weight"], weights["conv.weight"])
    assert average.weights["bn.num_batches_tracked"].item() == 1


def test_small_updates_are_not_lost_to_half_precision():
    """0.001 of the way from 1 to 1 + 2**-7 is below the spacing of bfloat16."""
    average = WeightAverage({"w": torch.ones(1, dtype=torch.bfloat16)}, 0.999)
    for _ in range(100):
        average.update({"w": torch.full((1,), 1 + 2**-7, dtype=torch.bfloat16)}, 10**6)
    assert average.weights["w"].item() == pytest.approx(1 + 2**-7 * (1 - 0.999**100), rel=1e-6)


def test_takes_the_weights_of_a_network_that_trains():
    module = nn.Sequential(nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8))
    average = WeightAverage(dict(module.state_dict(keep_vars=True)), 0.9)
    average.update(dict(module.state_dict(keep_vars=True)), 0)
    assert not any(value.requires_grad for value in average.weights.values())
    module.load_state_dict(average.weights)


def test_the_memory_format_is_kept():
    weight = torch.randn(8, 8, 3, 3).contiguous(memory_format=torch.channels_last)
    assert WeightAverage({"w": weight}, 0.9).weights["w"].is_contiguous(memory_format=torch.channels_last)


def test_a_saved_average_goes_on_as_it_would_have(tmp_path):
    values = list(series(6))
    whole, first = WeightAverage(values[0], 0.9), WeightAverage(values[0], 0.9)
    for step in range(6):
        whole.update(values[step + 1], step)
    for step in range(3):
        first.update(values[step + 1], step)
    torch.save(first.state_dict(), tmp_path / "average")
    second = WeightAverage(values[5], 0.9)
    second.load_state_dict(torch.load(tmp_path / "average", weights_only=True))
    for step in range(3, 6):
        second.update(values[step + 1], step)
    assert all(torch.equal(second.weights[name], whole.weights[name]) for name in whole.weights)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"conv.weight": None}, "conv.weight"),
        ({"fc.weight": torch.zeros(1)}, "fc.weight"),
        ({"bn.running_mean": torch.zeros(1)}, r"bn.running_mean is \(1,\) there and \(4,\) here"),
    ],
)
def test_another_networks_average_is_refused_whole(change, message):
    weights, other = series(1)
    average = WeightAverage(weights, 0.9)
    state = {name: value for name, value in (other | change).items() if value is not None}
    with pytest.raises(ValueError, match=message):
        average.load_state_dict(state)
    assert all(torch.equal(average.weights[name], weights[name]) for name in weights)


def test_a_missing_weight_is_an_error():
    average = WeightAverage(next(series(0)), 0.9)
    with pytest.raises(KeyError):
        average.update({"conv.weight": torch.zeros(2, 3)}, 0)


def test_nothing_is_read_from_the_device():
    """Tensors on the meta device have no values to read."""
    weights = {name: value.to("meta") for name, value in next(series(0, torch.float16)).items()}
    average = WeightAverage(weights, 0.9)
    average.update(weights, 0)
    assert all(value.is_meta for value in average.weights.values())
