"""DeepMoE-style networks (after Wang et al. 2020): the channels of a convolution are its experts, an image opens some.

A small embedding network looks at the image once. For every 3×3 convolution of a residual network, a gate
g = ReLU(W e) weighs the input channels, y = Σ_i g_i (K_i * x_i): a closed gate removes its channel, and with it the
work of computing it. The authors' code is not public; this follows the paper's equations and says where it must guess.

Letters: N images, Z embedding width, C channels.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models import ResNet
from torchvision.models.resnet import BasicBlock

from ermoe.errors import UserError


@dataclass(slots=True)
class DeepMoEOutput:
    """Class logits, the embedding network's own logits, and the gates of every convolution, (N, C) each."""

    logit_NK: Tensor
    embedding_logit_NK: Tensor
    gates: list[Tensor]


class _ChannelGate(nn.Module):
    """g = ReLU(W e), (N, C), without bias."""

    def __init__(self, embedding_dim: int, num_channels: int) -> None:
        super().__init__()
        self.linear = nn.Linear(embedding_dim, num_channels, bias=False)

    def forward(self, embedding_NZ: Tensor) -> Tensor:
        gate_NC: Tensor = F.relu(self.linear(embedding_NZ))
        return gate_NC


class _GatedBlock(nn.Module):
    """A residual block whose two convolutions see gated channels; the shortcut sees all of them."""

    def __init__(self, block: BasicBlock, embedding_dim: int) -> None:
        super().__init__()
        self.block = block
        self.gate1 = _ChannelGate(embedding_dim, block.conv1.in_channels)
        self.gate2 = _ChannelGate(embedding_dim, block.conv2.in_channels)

    def forward(self, x: Tensor, embedding_NZ: Tensor) -> tuple[Tensor, list[Tensor]]:
        block = self.block
        gates = [self.gate1(embedding_NZ), self.gate2(embedding_NZ)]
        shortcut = x if block.downsample is None else block.downsample(x)
        hidden = F.relu(block.bn1(block.conv1(_gated(x, gates[0]))))
        return F.relu(block.bn2(block.conv2(_gated(hidden, gates[1]))) + shortcut), gates


def _gated(x: Tensor, gate_NC: Tensor) -> Tensor:
    return x * gate_NC[:, :, None, None]


def embedding_network(dim: int, num_convolutions: int) -> nn.Sequential:
    """3×3 convolutions of stride 2, then the mean over the image. Widths are our guess: 32, 64, … up to ``dim``."""
    widths = [min(32 * 2**layer, dim) for layer in range(num_convolutions - 1)] + [dim]
    layers: list[nn.Module] = []
    for in_channels, out_channels in zip([3, *widths], widths, strict=False):
        layers += [nn.Conv2d(in_channels, out_channels, 3, stride=2, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())


class DeepMoEStyle(nn.Module):
    """A ResNet whose convolutions are gated per image and channel.

    J = CE(f(x)) + λ Σ_layers mean_N ‖g‖₁ + μ CE(head(e)). Training has two stages: all of J, then
    `begin_second_stage`, which freezes what decides the gates and drops the last two terms. Images do not influence
    each other at inference.

    Args:
        base: a torchvision ResNet made of basic blocks (ResNet-18 or 34). It is copied.
        embedding_dim: width of the embedding e.
        num_convolutions: of the embedding network; the paper has 4 for small images and 5 for ImageNet.
        gate_weight: λ.
        embedding_weight: μ.

    >>> import torch
    >>> from torchvision.models import resnet18
    >>> DeepMoEStyle(resnet18(num_classes=10)).eval()(torch.randn(2, 3, 32, 32)).shape
    torch.Size([2, 10])
    """

    def __init__(
        self,
        base: ResNet,
        *,
        embedding_dim: int = 128,
        num_convolutions: int = 4,
        gate_weight: float = 1e-3,
        embedding_weight: float = 1.0,
    ) -> None:
        super().__init__()
        base = copy.deepcopy(base)
        blocks = [block for stage in (base.layer1, base.layer2, base.layer3, base.layer4) for block in stage]
        if not all(isinstance(block, BasicBlock) for block in blocks):
            raise UserError(
                "the base has bottleneck blocks: DeepMoE-style gates need basic blocks; use ResNet-18 or 34"
            )
        if num_convolutions < 1:
            raise UserError(f"num_convolutions={num_convolutions}: the embedding network needs at least one")
        self.embedding = embedding_network(embedding_dim, num_convolutions)
        self.embedding_head = nn.Linear(embedding_dim, base.fc.out_features)
        self.stem = nn.Sequential(base.conv1, base.bn1, base.relu, base.maxpool)
        self.blocks = nn.ModuleList(_GatedBlock(block, embedding_dim) for block in blocks)
        self.head = nn.Sequential(base.avgpool, nn.Flatten(), base.fc)
        self.gate_weight = gate_weight
        self.embedding_weight = embedding_weight
        self.num_classes = base.fc.out_features

    def forward(self, images: Tensor) -> Tensor:
        """Class logits; without a classifier the features before it."""
        return self.decide(images).logit_NK

    def reset_classifier(self, num_classes: int = 0) -> None:
        """From now on the network returns features, for linear probes."""
        if num_classes:
            raise UserError(f"num_classes={num_classes}: build a new network for other classes; 0 returns features")
        self.num_classes = 0
        self.head[-1] = nn.Identity()

    def decide(self, images: Tensor) -> DeepMoEOutput:
        """The prediction and the gates that led to it."""
        embedding_NZ = self.embedding(images)
        x, gates = self.stem(images), []
        for block in self.blocks:
            x, own = block(x, embedding_NZ)
            gates += own
        return DeepMoEOutput(self.head(x), self.embedding_head(embedding_NZ), gates)

    def loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """J; in the second stage only its first term."""
        output = self.decide(images)
        loss = F.cross_entropy(output.logit_NK, labels)
        if self.gate_weight:
            loss = loss + self.gate_weight * sum(gate_NC.sum(-1).mean() for gate_NC in output.gates)
        if self.embedding_weight:
            loss = loss + self.embedding_weight * F.cross_entropy(output.embedding_logit_NK, labels)
        return loss

    def begin_second_stage(self) -> None:
        """Gates and embedding stay as they are, the network is tuned to them."""
        self.gate_weight = self.embedding_weight = 0.0
        deciding = [self.embedding, self.embedding_head, *(m for m in self.modules() if isinstance(m, _ChannelGate))]
        for module in deciding:
            module.requires_grad_(False)
