import pytest
import torch
from torch import nn

from image_classification.config import OptimConfig
from image_classification.optim import build_optimizer
from image_classification.resnet import build_resnet


def groups_of(model, **fields):
    decay, no_decay = build_optimizer(model, OptimConfig(**fields), lr=0.1).param_groups
    return decay, no_decay


def names_in(model, group):
    names = {parameter: name for name, parameter in model.named_parameters()}
    return [names[parameter] for parameter in group["params"]]


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_convolution_and_linear_weights_decay_and_nothing_else(arch):
    model = build_resnet(arch, 10, stem="cifar", width_multiplier=0.125)
    decay, no_decay = groups_of(model, weight_decay=5e-4)
    assert (decay["weight_decay"], no_decay["weight_decay"]) == (5e-4, 0.0)
    # Every convolution and linear weight of a ResNet has two dimensions or more, norms and biases have one.
    assert all(parameter.ndim >= 2 for parameter in decay["params"])
    assert all(parameter.ndim == 1 for parameter in no_decay["params"])
    assert {"layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias", "bn1.weight", "fc.bias"} <= set(
        names_in(model, no_decay)
    )
    assert {"conv1.weight", "layer2.0.downsample.0.weight", "fc.weight"} <= set(names_in(model, decay))


def test_no_parameter_is_lost_or_taken_twice():
    model = build_resnet("resnet50", 10, stem="imagenet", width_multiplier=0.125)
    names = [name for group in groups_of(model) for name in names_in(model, group)]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm2d(4),
        nn.BatchNorm3d(4),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, affine=True),
        nn.InstanceNorm2d(4, affine=True),
        nn.InstanceNorm3d(4, affine=True),
        nn.GroupNorm(2, 4),
        nn.LayerNorm((2, 4)),
        nn.RMSNorm((2, 4)),
        type("OwnNorm", (nn.LayerNorm,), {})((2, 4)),
    ],
    ids=lambda norm: type(norm).__name__,
)
def test_norms_are_known_by_type_whatever_their_name_and_shape(norm):
    model = nn.ModuleDict({"anything": norm, "linear_named_bn": nn.Linear(4, 4)})
    decay, no_decay = groups_of(model)
    assert names_in(model, decay) == ["linear_named_bn.weight"]
    assert set(no_decay["params"]) == {*norm.parameters(), model["linear_named_bn"].bias}


def test_a_shared_parameter_is_taken_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    decay, no_decay = groups_of(nn.Sequential(first, second))
    assert len(decay["params"]) == 1 and not no_decay["params"]


@pytest.mark.parametrize("nesterov", [False, True])
def test_step_is_sgd_with_momentum_of_the_paper_formula(nesterov):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    config = OptimConfig(momentum=0.9, weight_decay=0.1, nesterov=nesterov)
    optimizer = build_optimizer(model, config, lr=1.0)
    velocities = [torch.zeros_like(weight), torch.zeros_like(bias)]
    for lr in (0.5, 0.25):
        for group in optimizer.param_groups:
            group["lr"] = lr
        model.weight.grad, model.bias.grad = torch.ones_like(weight), torch.ones_like(bias)
        optimizer.step()
        for value, velocity, decay in zip((weight, bias), velocities, (0.1, 0.0), strict=True):
            gradient = 1 + decay * value
            velocity.mul_(0.9).add_(gradient)
            value -= lr * (gradient + 0.9 * velocity if nesterov else velocity)
    torch.testing.assert_close(model.weight.detach(), weight)
    torch.testing.assert_close(model.bias.detach(), bias)
