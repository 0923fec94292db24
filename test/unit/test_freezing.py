import pytest
import torch
from torch import nn

from image_classification.config import OptimConfig
from image_classification.freezing import freeze, freeze_all_but_head, train_mode
from image_classification.optim import build_optimizer
from image_classification.resnet import build_resnet
from mmcls.utils.distribution import wrap_distributed_model
from mmcls.utils.errors import RequestError


@pytest.fixture
def module():
    torch.manual_seed(0)
    return build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125)


def frozen_names(module):
    return {name for name, parameter in module.named_parameters() if not parameter.requires_grad}


@pytest.mark.parametrize("names", [("conv1",), ("conv1", "bn1", "layer1"), ("layer2.0",), ("fc", "layer4.1.bn2")])
def test_the_named_parts_are_frozen_and_nothing_else(module, names):
    freeze(module, names)
    expected = {name for name, _ in module.named_parameters() if any(name.startswith(f"{prefix}.") for prefix in names)}
    assert frozen_names(module) == expected


def test_no_names_freeze_nothing(module):
    freeze(module, ())
    assert not frozen_names(module)


def test_layer1_is_not_layer10():
    module = nn.ModuleDict({"layer1": nn.Linear(2, 2), "layer10": nn.Linear(2, 2)})
    freeze(module, ["layer1"])
    assert frozen_names(module) == {"layer1.weight", "layer1.bias"}


@pytest.mark.parametrize("name", ["layer9", "layer1.7", "conv", "", "fc.weight", "relu", "bn1.running_mean"])
def test_an_unknown_part_is_refused(module, name):
    with pytest.raises(RequestError) as caught:
        freeze(module, ["conv1", name])
    assert caught.value.subject == f"--freeze={name}"
    assert "conv1, bn1, layer1, layer2, layer3, layer4, fc" in caught.value.remedy


def test_freezing_everything_is_refused(module):
    names = [name for name, _ in module.named_children()]
    names = [name for name in names if name not in ("relu", "maxpool", "avgpool")]
    with pytest.raises(RequestError, match="nothing to train") as caught:
        freeze(module, names)
    assert caught.value.subject == "--freeze=conv1,bn1,layer1,layer2,layer3,layer4,fc"


def test_all_but_the_head(module):
    freeze_all_but_head(module)
    assert frozen_names(module) == {name for name, _ in module.named_parameters()} - {"fc.weight", "fc.bias"}
    with pytest.raises(RequestError, match="nothing to train"):
        freeze(module, ["fc"])


def step(model, module):
    optimizer = build_optimizer(module, OptimConfig(), lr=0.1)
    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    model(images).square().sum().backward()
    optimizer.step()


def changed(module, before):
    return {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}


@pytest.mark.parametrize("wrapped", [False, True])
def test_frozen_parts_keep_weights_and_statistics(module, wrapped, process_group):
    freeze(module, ["conv1", "bn1", "layer1"])
    model = wrap_distributed_model(module, "cpu") if wrapped else module
    before = {name: value.clone() for name, value in module.state_dict().items()}
    train_mode(model)
    step(model, module)
    expected = {name for name in before if not name.startswith(("conv1.", "bn1.", "layer1."))}
    assert changed(module, before) == expected
    assert model.training and not module.bn1.training and module.layer2[0].bn1.training


def test_a_norm_whose_convolution_alone_is_frozen_goes_on_counting(module):
    freeze(module, ["conv1"])
    train_mode(module)
    assert module.bn1.training


def test_training_mode_comes_back_to_norms_that_are_not_frozen(module):
    freeze(module, ["bn1"])
    module.eval()
    train_mode(module)
    still = [name for name, part in module.named_modules() if not part.training]
    assert still == ["bn1"]


@pytest.mark.parametrize("norm", [nn.GroupNorm(2, 4), nn.SyncBatchNorm(4), nn.InstanceNorm2d(4, affine=True)])
def test_every_type_of_norm_is_held(norm):
    module = nn.Sequential(norm, nn.Linear(2, 2))
    freeze(module, ["0"])
    train_mode(module)
    assert not module[0].training and module[1].training


def test_a_norm_without_weights_is_none_that_was_frozen():
    module = nn.Sequential(nn.BatchNorm2d(4, affine=False))
    train_mode(module)
    assert module[0].training
