"""SFCN, the light convolutional network for brain age of Peng et al. (Medical Image Analysis, 2021)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError


class SFCN(nn.Module):
    """Five convolutions that halve the volume, one of width 1, a mean over what is left, and a linear layer.

    The pooling before the classifier is over whatever remains of the volume, so any size of at least 32 voxels along
    each axis will do. With the 40 bins of the authors it has their 2,952,936 parameters, and `load_state_dict` takes
    weights under the authors' names, also with the "module." of a parallel model before them.

    >>> import torch
    >>> SFCN(num_classes=40)(torch.randn(2, 1, 32, 40, 32)).shape
    torch.Size([2, 40])
    """

    def __init__(
        self,
        *,
        num_classes: int = 40,
        in_chans: int = 1,
        channels: Sequence[int] = (32, 64, 128, 256, 256, 64),
        drop_rate: float = 0.5,
    ) -> None:
        super().__init__()
        self.config: dict[str, Any] = {"in_chans": in_chans, "channels": list(channels), "drop_rate": drop_rate}
        self.num_classes = num_classes
        *halving, last = channels
        self.smallest = 2 ** len(halving)
        widths = (in_chans, *halving)
        self.features = nn.Sequential(
            *(_halving(before, after) for before, after in zip(widths, halving, strict=False)),
            nn.Sequential(nn.Conv3d(halving[-1], last, 1), nn.BatchNorm3d(last), nn.ReLU(inplace=True)),
        )
        self.head_drop = nn.Dropout(drop_rate)
        self.head = nn.Linear(last, num_classes)
        self.register_load_state_dict_pre_hook(_renamed)

    def forward(self, volume: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (B, num_classes) of volumes (B, C, X, Y, Z); a convolution has no use for the mask."""
        if min(volume.shape[2:]) < self.smallest:
            raise UserError(f"a volume of {tuple(volume.shape[2:])} voxels is too small: SFCN needs {self.smallest}")
        # Convolutions and pooling over volumes are fastest with channels side by side.
        feature = self.features(volume.contiguous(memory_format=torch.channels_last_3d))
        return self.head(self.head_drop(feature.mean((2, 3, 4))))


_OF_THE_AUTHORS = re.compile(r"(?:module\.)?(?:feature_extractor\.conv_(\d+)\.|classifier\.conv_\d+\.)(.+)")


def _renamed(module: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Gives weights under the authors' names those of this network; their head is a convolution of width 1."""
    for name in list(state):
        if known := _OF_THE_AUTHORS.fullmatch(name.removeprefix(prefix)):
            stage, rest = known.groups()
            weight = state.pop(name)
            own = f"head.{rest}" if stage is None else f"features.{stage}.{rest}"
            state[prefix + own] = weight.flatten(1) if own == "head.weight" else weight


def _halving(before: int, after: int) -> nn.Sequential:
    # The authors pool before the activation, not after it.
    return nn.Sequential(
        nn.Conv3d(before, after, 3, padding=1), nn.BatchNorm3d(after), nn.MaxPool3d(2), nn.ReLU(inplace=True)
    )
