"""The ResNet family of He et al. 2016 (arXiv:1512.03385), section 3.3 and table 1.

Modules and parameters have torchvision's names and order, so weights move between the two unchanged. As there, a
bottleneck strides in its 3x3 convolution and not in the first 1x1 (known as v1.5).
"""

from typing import Literal

import torch
from torch import Tensor, nn

from image_classification.config import Arch
from mmcls.utils.errors import RequestError


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut (the paper's figure 5, left).

    Args:
        in_channels: channels of the input.
        channels: channels of the convolutions; the output has `channels * expansion`.
        stride: stride of the first convolution and of the shortcut.
    """

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = _conv(in_channels, channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, channels * self.expansion, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm that ends the residual branch."""
        return self.bn2

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += self.downsample(x)
        return self.relu(out)


class Bottleneck(nn.Module):
    """A 1x1, a 3x3 and a widening 1x1 convolution and a shortcut (the paper's figure 5, right).

    Args:
        in_channels: channels of the input.
        channels: channels of the first two convolutions; the output has `channels * expansion`.
        stride: stride of the 3x3 convolution and of the shortcut.
    """

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int):
        super().__init__()
        self.conv1 = _conv(in_channels, channels, 1)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = _conv(channels, channels, 3, stride)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = _conv(channels, channels * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(channels * self.expansion)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = _shortcut(in_channels, channels * self.expansion, stride)

    @property
    def last_norm(self) -> nn.BatchNorm2d:
        """The norm that ends the residual branch."""
        return self.bn3

    def forward(self, x: Tensor) -> Tensor:
        """Maps [N, C_in, H, W] to [N, C_out, H / stride, W / stride]."""
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += self.downsample(x)
        return self.relu(out)


class ResNet(nn.Module):
    """A ResNet with four stages of blocks; `build_resnet` builds the named ones.

    Args:
        block: the kind of block.
        depths: blocks in each of the four stages.
        num_classes: number of outputs.
        stem: the first layers, see `build_resnet`.
        stem_channels: channels of the stem and of the first stage's blocks; each later stage has twice as many.
    """

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        depths: tuple[int, int, int, int],
        num_classes: int,
        *,
        stem: Literal["imagenet", "cifar"],
        stem_channels: int = 64,
    ):
        super().__init__()
        cifar = stem == "cifar"
        self.conv1 = _conv(3, stem_channels, 3) if cifar else _conv(3, stem_channels, 7, stride=2)
        self.bn1 = nn.BatchNorm2d(stem_channels)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.Identity() if cifar else nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        in_channels = stem_channels
        for i, depth in enumerate(depths):
            channels = stem_channels * 2**i
            blocks = []
            for j in range(depth):
                blocks.append(block(in_channels, channels, stride=2 if i > 0 and j == 0 else 1))
                in_channels = channels * block.expansion
            setattr(self, f"layer{i + 1}", nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(in_channels, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Maps images [N, 3, H, W], normalised, to logits [N, num_classes]."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


CHANNEL_STEP = 8

_FAMILY: dict[Arch, tuple[type[BasicBlock | Bottleneck], tuple[int, int, int, int]]] = {
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
    "resnet152": (Bottleneck, (3, 8, 36, 3)),
}


def build_resnet(
    arch: Arch,
    num_classes: int,
    *,
    stem: Literal["imagenet", "cifar"],
    width_multiplier: float = 1.0,
    zero_init_last_norm: bool = False,
) -> ResNet:
    """Builds a ResNet with fresh weights, drawn from torch's default generator.

    Convolutions start as He et al. 2015 (arXiv:1502.01852), section 2.2, with fan-out and gain sqrt(2); norms as
    the identity; the last layer as torch's `Linear`.

    Args:
        arch: the member of the family.
        num_classes: number of outputs.
        stem: `imagenet` is 7x7 with stride 2 and a max-pool (the stages see 1/4 of the image's side), `cifar` is
            3x3 with stride 1 and no pool (they see the whole side).
        width_multiplier: scales the channels of every layer; a multiple of 1/8.
        zero_init_last_norm: start the last norm of each residual branch at zero, so that each block starts as its
            shortcut (Goyal et al. 2017, arXiv:1706.02677, section 5.1).

    Raises:
        RequestError: the width multiplier is no multiple of 1/8.
    """
    stem_channels = 64 * width_multiplier
    # Whole vectors of channels: with 4 of them, torch 2.14's channels-last kernels write past their memory on AVX2.
    if stem_channels <= 0 or stem_channels % CHANNEL_STEP:
        raise RequestError(
            f"--width_multiplier={width_multiplier:g}",
            f"gives the first layer {stem_channels:g} channels, not a multiple of {CHANNEL_STEP}",
            "take a multiple of 0.125",
        )
    stem_channels = int(stem_channels)
    block, depths = _FAMILY[arch]
    model = ResNet(block, depths, num_classes, stem=stem, stem_channels=stem_channels)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif zero_init_last_norm and isinstance(module, BasicBlock | Bottleneck):
            nn.init.zeros_(module.last_norm.weight)
    return model


def _conv(in_channels: int, out_channels: int, kernel_size: int, stride: int = 1) -> nn.Conv2d:
    # Without bias: the norm that follows has one.
    return nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    """The identity where shapes allow it, else a projection (option B of the paper's section 3.3)."""
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))
