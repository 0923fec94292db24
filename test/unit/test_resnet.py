import math

import pytest
import torch
import torchvision
from torch import nn

from image_classification.resnet import BasicBlock, Bottleneck, build_resnet
from mmcls.utils.errors import RequestError

FAMILY = ["resnet18", "resnet34", "resnet50", "resnet101", "resnet152"]


def num_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("arch", FAMILY)
def test_state_dict_is_torchvisions(arch):
    with torch.device("meta"):
        ours = build_resnet(arch, 1000, stem="imagenet").state_dict()
        theirs = getattr(torchvision.models, arch)().state_dict()
    assert list(ours) == list(theirs)
    assert [(v.shape, v.dtype) for v in ours.values()] == [(v.shape, v.dtype) for v in theirs.values()]


@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_weights_and_logits_agree_with_torchvision_both_ways(arch, train):
    torch.manual_seed(0)
    ours = build_resnet(arch, 10, stem="imagenet").train(train)
    theirs = getattr(torchvision.models, arch)(num_classes=10).train(train)
    images = torch.randn(2, 3, 64, 64)
    for module in theirs.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.0)
            nn.init.normal_(module.bias, std=0.1)
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    with torch.no_grad():
        before = ours(images)
        ours.load_state_dict(theirs.state_dict(), strict=True)
        expected = theirs(images)
        torch.testing.assert_close(ours(images), expected, rtol=0, atol=1e-5)
        assert (before - expected).abs().max() > 1e-2
        theirs.load_state_dict(ours.state_dict(), strict=True)
        torch.testing.assert_close(theirs(images), ours(images), rtol=0, atol=1e-5)


def test_gradients_agree_with_torchvision():
    torch.manual_seed(0)
    ours = build_resnet("resnet18", 10, stem="imagenet")
    theirs = torchvision.models.resnet18(num_classes=10)
    theirs.load_state_dict(ours.state_dict())
    images = torch.randn(4, 3, 64, 64)
    for model in (ours, theirs):
        model(images).square().mean().backward()
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6, msg=name)


def test_cifar_stem_keeps_the_resolution():
    model = build_resnet("resnet50", 10, stem="cifar")
    sizes = {}
    for name in ("conv1", "maxpool", "layer1", "layer2", "layer3", "layer4"):
        getattr(model, name).register_forward_hook(lambda _m, _i, out, name=name: sizes.update({name: out.shape[1:]}))
    with torch.no_grad():
        assert model(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert sizes == {
        "conv1": (64, 32, 32),
        "maxpool": (64, 32, 32),
        "layer1": (256, 32, 32),
        "layer2": (512, 16, 16),
        "layer3": (1024, 8, 8),
        "layer4": (2048, 4, 4),
    }
    assert (model.conv1.kernel_size, model.conv1.stride) == ((3, 3), (1, 1))
    assert not any(isinstance(module, nn.MaxPool2d) for module in model.modules())
    # The network of the CIFAR literature: 23.52 million.
    assert num_parameters(model) == 23_520_842


def test_cifar_stem_differs_from_torchvision_in_the_first_weight_only():
    with torch.device("meta"):
        cifar = build_resnet("resnet50", 1000, stem="cifar").state_dict()
        imagenet = torchvision.models.resnet50().state_dict()
    assert list(cifar) == list(imagenet)
    assert [name for name in cifar if cifar[name].shape != imagenet[name].shape] == ["conv1.weight"]


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
@pytest.mark.parametrize(("width_multiplier", "stem_channels"), [(0.125, 8), (0.25, 16), (2.0, 128)])
def test_width_multiplier_scales_every_layer(arch, width_multiplier, stem_channels):
    with torch.device("meta"):
        narrow = build_resnet(arch, 10, stem="imagenet", width_multiplier=width_multiplier)
        full = build_resnet(arch, 10, stem="imagenet")
    assert narrow.conv1.out_channels == stem_channels
    norms = [m for m in narrow.modules() if isinstance(m, nn.BatchNorm2d)]
    full_norms = [m for m in full.modules() if isinstance(m, nn.BatchNorm2d)]
    assert [m.num_features for m in norms] == [m.num_features * width_multiplier for m in full_norms]
    assert narrow(torch.zeros(2, 3, 32, 32, device="meta")).shape == (2, 10)


@pytest.mark.parametrize("width_multiplier", [0.0, -1.0, 0.001, 0.0625, 0.3])
def test_width_without_whole_vectors_of_channels_is_refused(width_multiplier):
    with pytest.raises(RequestError, match=r"--width_multiplier=.*not a multiple of 8"):
        build_resnet("resnet18", 10, stem="cifar", width_multiplier=width_multiplier)


def test_convolutions_start_kaiming_fan_out_and_norms_as_the_identity():
    torch.manual_seed(0)
    model = build_resnet("resnet18", 10, stem="imagenet")
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            fan_out = module.out_channels * math.prod(module.kernel_size)
            std = math.sqrt(2 / fan_out)
            # Standard errors of the mean and of the standard deviation of n normal draws, times 4.
            n = module.weight.numel()
            assert module.weight.mean().abs().item() < 4 * std / math.sqrt(n)
            assert module.weight.std().item() == pytest.approx(std, abs=4 * std / math.sqrt(2 * n))
            assert module.bias is None
        elif isinstance(module, nn.BatchNorm2d):
            assert torch.all(module.weight == 1) and torch.all(module.bias == 0)


@pytest.mark.parametrize("arch", ["resnet18", "resnet50"])
def test_zero_init_makes_each_block_its_shortcut(arch):
    model = build_resnet(arch, 10, stem="cifar", width_multiplier=0.125, zero_init_last_norm=True)
    blocks = [m for m in model.modules() if isinstance(m, BasicBlock | Bottleneck)]
    for block in blocks:
        x = torch.rand(2, block.conv1.in_channels, 8, 8)
        torch.testing.assert_close(block(x), block.downsample(x).relu())
    zeroed = [name for name, p in model.named_parameters() if name.endswith("weight") and torch.all(p == 0)]
    last = "bn2.weight" if arch == "resnet18" else "bn3.weight"
    assert len(zeroed) == len(blocks) and all(name.startswith("layer") and name.endswith(last) for name in zeroed)


def test_same_seed_same_weights():
    models = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        models.append(build_resnet("resnet18", 10, stem="cifar", width_multiplier=0.125).conv1.weight)
    assert torch.equal(models[0], models[1]) and not torch.equal(models[0], models[2])
