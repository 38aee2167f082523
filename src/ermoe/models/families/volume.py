"""The adapter of ermoe's own transformer for volumes, whose sequences have padding."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.models.families import named_blocks
from ermoe.models.ffn import FFN, Linear
from ermoe.models.sparse_block import SparseBlock
from ermoe.models.vit3d import FeedForward, ViT3D, VolumeBlock
from ermoe.plain import Json


class SparseVolumeBlock(SparseBlock, VolumeBlock):
    """The block with experts; padded tokens are not routed and not counted."""

    dense_class = VolumeBlock

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """``mask_BN`` is True for real tokens."""
        if self.needs_weights:
            attended, alpha_BNN = self.attn(
                self.norm1(x_BND), mask_BN, need_weights=True, context_grad=self.context_grad
            )
        else:
            attended, alpha_BNN = self.attn(self.norm1(x_BND), mask_BN), None
        x_BND = x_BND + self.drop_path1(attended)
        out_BND: Tensor = x_BND + self.drop_path2(self.mix(self.norm2(x_BND), alpha_BNN, attended, mask_BN))
        return out_BND


SPARSE_BLOCK = SparseVolumeBlock


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The transformer blocks with their names."""
    return list(named_blocks(model, "blocks"))


def refusal(block: Any) -> str | None:
    """Why this block cannot be made sparse; None if it can."""
    if type(block) is not VolumeBlock:
        return f"it is a {type(block).__name__}, not a VolumeBlock"
    if type(block.mlp) is not FeedForward:
        return f"its feed-forward network is a {type(block.mlp).__name__}, not a FeedForward"
    return None


def no_context(block: Any) -> str | None:
    """None: every block can say where its tokens looked."""
    return None


def ffn(block: Any) -> FFN:
    """The block's dense feed-forward network."""
    mlp = block.mlp
    return FFN(up=Linear.of(mlp.fc1), down=Linear.of(mlp.fc2), act=mlp.act, norm=block.norm2, drop=mlp.drop.p)


def num_tokens(model: Any) -> int:
    """Length of the sequence for a volume of the model's own size."""
    return int(1 + math.prod(model.grid_size))


def image_size(model: Any) -> tuple[int, ...]:
    """The model's own size of volumes."""
    return tuple(model.config["volume_size"])


def describe(model: Any) -> Json:
    """The arguments of the constructor."""
    return {**model.config, "num_classes": model.num_classes, "global_pool": model.global_pool}


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The dense model a description means, freshly initialised."""
    with torch.device(device):
        return ViT3D(**description)
