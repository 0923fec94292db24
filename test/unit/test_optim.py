import copy
import sys

import pytest
import torch
from torch import nn

from image_classification.config import OptimConfig
from image_classification.optim import build_optimizer
from image_classification.resnet import build_resnet
from mmcls.utils.errors import RequestError


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


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_frozen_parameters_are_left_out(optimizer):
    model = build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125)
    model.requires_grad_(False).fc.requires_grad_(True)
    decay, no_decay = groups_of(model, optimizer=optimizer)
    assert (names_in(model, decay), names_in(model, no_decay)) == (["fc.weight"], ["fc.bias"])


def set_gradients(model, step):
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator)


class LarsByHand:
    """You et al. 2017, algorithm 1, in double precision; the learning rate multiplies the momentum."""

    def __init__(self, model, config):
        self.config = config
        self.values = {name: parameter.detach().double() for name, parameter in model.named_parameters()}
        self.velocities = {name: torch.zeros_like(value) for name, value in self.values.items()}

    def step(self, model, lr):
        momentum = self.config.momentum
        for name, parameter in model.named_parameters():
            w, v, gradient = self.values[name], self.velocities[name], parameter.grad.double()
            if w.ndim > 1:
                decay = self.config.weight_decay
                rate = (
                    0.001 * w.square().sum().sqrt() / (gradient.square().sum().sqrt() + decay * w.square().sum().sqrt())
                )
                gradient = rate * (gradient + decay * w)
            v.mul_(momentum).add_(gradient)
            w -= lr * (gradient + momentum * v if self.config.nesterov else v)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
@pytest.mark.parametrize("foreach", [False, True])
def test_lars_is_the_papers_formula(nesterov, weight_decay, foreach):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))
    config = OptimConfig(optimizer="lars", momentum=0.9, weight_decay=weight_decay, nesterov=nesterov)
    optimizer, by_hand = build_optimizer(model, config, lr=1.0), LarsByHand(model, config)
    for step, lr in enumerate((8.0, 8.0, 4.0)):
        for group in optimizer.param_groups:
            group["lr"], group["foreach"] = lr, foreach
        set_gradients(model, step)
        by_hand.step(model, lr)
        optimizer.step()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach().double(), by_hand.values[name], rtol=1e-5, atol=1e-6)


def test_lars_moves_norms_and_biases_as_sgd_does():
    models = [build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    for step in range(2):
        for model, name in zip(models, ("sgd", "lars"), strict=True):
            set_gradients(model, step)
            build_optimizer(model, OptimConfig(optimizer=name), lr=0.1).step()
    differ = {
        name
        for (name, sgd), lars in zip(models[0].named_parameters(), models[1].parameters(), strict=True)
        if not torch.equal(sgd, lars)
    }
    assert differ == {name for name, parameter in models[0].named_parameters() if parameter.ndim > 1}


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
def test_a_saved_optimizer_goes_on_as_it_would_have(optimizer, tmp_path):
    config = OptimConfig(optimizer=optimizer)
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    other = copy.deepcopy(model)
    whole, resumed = build_optimizer(model, config, lr=0.1), build_optimizer(other, config, lr=0.1)
    for step in range(2):
        set_gradients(model, step)
        whole.step()
    torch.save((whole.state_dict(), model.state_dict()), tmp_path / "saved")
    optimizer_state, weights = torch.load(tmp_path / "saved", weights_only=True)
    resumed.load_state_dict(optimizer_state)
    other.load_state_dict(weights)
    for pair in ((model, whole), (other, resumed)):
        set_gradients(pair[0], 2)
        pair[1].step()
    assert all(torch.equal(*pair) for pair in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "lars"])
@pytest.mark.parametrize("foreach", [False, True])
def test_a_step_reads_nothing_from_the_device(optimizer, foreach):
    """Tensors on the meta device have no values to read."""
    model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)).to("meta")
    built = build_optimizer(model, OptimConfig(optimizer=optimizer, nesterov=True), lr=0.1)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = torch.empty_like(parameter)
        for group in built.param_groups:
            group["foreach"] = foreach
        built.step()


def test_lars_without_timm_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm.optim", None)
    with pytest.raises(RequestError) as caught:
        build_optimizer(nn.Linear(2, 2), OptimConfig(optimizer="lars"), lr=0.1)
    assert caught.value.subject == "--optimizer=lars"
    assert "timm" in caught.value.problem and caught.value.remedy == "pip install timm"
