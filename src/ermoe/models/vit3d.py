"""A vision transformer for volumes: cubes for patches, and a mask for the cubes that hold nothing.

Letters: B volumes, C channels, X, Y, Z voxels along the axes, P voxels along the edge of a cube, N tokens, D width.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock
from ermoe.nn import ContextAttention
from ermoe.nn.ffn import FFN, Linear

_PLACE_RATE = 10.0  # optimisers move by their rate, whatever a weight's size: those of places, around 1, move faster
# Of the arguments of `ViT3D`: the last two change with its classifier.
_NOT_CONFIGURED = ("self", "__class__", "num_classes", "global_pool")


class FeedForward(nn.Module):
    """fc2(GELU(fc1(x))), with dropout after each step; parameters are named as in timm, whose import takes seconds."""

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0) -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) → (B, N, D)."""
        out_BND: Tensor = self.drop(self.fc2(self.drop(self.act(self.fc1(x_BND)))))
        return out_BND


class _DropPath(nn.Module):
    """Leaves out the whole residual of some sequences in training, and scales the others to the same mean."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, x_BND: Tensor) -> Tensor:
        """(B, N, D) → (B, N, D)."""
        if not self.training or self.rate == 0:
            return x_BND
        kept_B11 = x_BND.new_empty(x_BND.shape[0], 1, 1).bernoulli_(1 - self.rate)
        return x_BND * kept_B11.div_(1 - self.rate) if self.rate < 1 else x_BND * kept_B11


class VolumeBlock(nn.Module):
    """A pre-norm transformer block over sequences with padding. `ermoe.upcycle` gives it experts."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        mlp_ratio: float = 4.0,
        proj_drop: float = 0.0,
        attn_drop: float = 0.0,
        drop_path: float = 0.0,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, eps=1e-6)
        self.attn = ContextAttention(dim, num_heads, attn_drop=attn_drop, proj_drop=proj_drop)
        self.drop_path1 = _DropPath(drop_path)
        self.norm2 = nn.LayerNorm(dim, eps=1e-6)
        self.mlp = FeedForward(dim, int(dim * mlp_ratio), drop=proj_drop)
        self.drop_path2 = _DropPath(drop_path)

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """``mask_BN`` is True for real tokens; nobody looks at the others."""
        x_BND = x_BND + self.drop_path1(self.attn(self.norm1(x_BND), mask_BN))
        out_BND: Tensor = x_BND + self.drop_path2(self.mlp(self.norm2(x_BND)))
        return out_BND


class ViT3D(nn.Module):
    """A vision transformer over the P³ cubes of a volume, with a class token.

    A volume whose edges are no multiples of P is padded at their ends, never cropped. A cube without a single real
    voxel, as told by the ``mask`` of a forward pass, is a padded token: no one attends to it, it meets no expert and is
    counted nowhere.

    Args:
        volume_size: largest volume (X, Y, Z); smaller ones take the corner of its grid. With
            ``pos_embed="sincos"`` it is only the usual one, and larger volumes are welcome.
        patch_size: edge P of a cube.
        pos_embed: "learned", or "sincos" for fixed sine-cosine positions in three dimensions.
        global_pool: the head sees the class "token"; "avg", the mean of the real cubes; or "places", a mean in which
            every place of the grid has weights of its own, drawn around 1: what shows in one region alone is not lost
            among the others then.

    >>> from ermoe.models.upcycle import upcycle
    >>> model = ViT3D((40, 32, 32), patch_size=16, embed_dim=48, depth=2, num_heads=4)
    >>> model(torch.randn(2, 1, 33, 32, 30)).shape
    torch.Size([2, 1])
    >>> sparse = upcycle(model, num_experts=4, score="prototype", init="random")
    >>> sparse(torch.randn(2, 1, 33, 32, 30)).shape
    torch.Size([2, 1])
    """

    def __init__(
        self,
        volume_size: Sequence[int] = (96, 112, 96),
        *,
        patch_size: int = 16,
        in_chans: int = 1,
        num_classes: int = 1,
        embed_dim: int = 384,
        depth: int = 12,
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        pos_embed: str = "learned",
        global_pool: str = "token",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
    ) -> None:
        arguments = dict(locals())
        super().__init__()
        self.config: Json = {name: arguments[name] for name in arguments if name not in _NOT_CONFIGURED}
        self.config["volume_size"] = list(volume_size)
        if len(volume_size) != 3 or min(volume_size) < 1:
            raise UserError(f"volume_size={tuple(volume_size)}: need three positive numbers of voxels")
        if pos_embed not in ("learned", "sincos"):
            raise UserError(f"pos_embed={pos_embed!r}: use 'learned' or 'sincos'")
        if patch_size < 1:
            raise UserError(f"patch_size={patch_size}: a cube has an edge of at least one voxel")
        self.patch_size, self.in_chans, self.embed_dim = patch_size, in_chans, embed_dim
        self.num_features, self.global_pool = embed_dim, global_pool
        self.grid_size = tuple(math.ceil(size / patch_size) for size in volume_size)
        self.grad_checkpointing = False

        self.patch_embed = nn.Conv3d(in_chans, embed_dim, kernel_size=patch_size, stride=patch_size)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, embed_dim))
        self.pos_embed = nn.Parameter(torch.zeros(1, *self.grid_size, embed_dim)) if pos_embed == "learned" else None
        rates = torch.linspace(0, drop_path_rate, depth, device="cpu").tolist()
        options = {"mlp_ratio": mlp_ratio, "proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate}
        self.blocks = nn.ModuleList(VolumeBlock(embed_dim, num_heads, drop_path=rate, **options) for rate in rates)
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6)
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)
        self._init_weights()

    def _init_weights(self) -> None:
        if self.cls_token.is_meta:  # nothing to draw, and torch would import its compiler to draw it
            return
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        nn.init.normal_(self.cls_token, std=1e-6)
        if self.pos_embed is not None:
            nn.init.trunc_normal_(self.pos_embed, std=0.02)

    def forward(self, volume: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (B, num_classes) of volumes (B, C, X, Y, Z); ``mask`` (B, X, Y, Z) is True for real voxels."""
        tokens_BND, mask_BN = self.tokenize(volume, mask)
        return self.forward_head(self.forward_tokens(tokens_BND, mask_BN), mask_BN)

    def forward_features(self, volume: Tensor, mask: Tensor | None = None) -> Tensor:
        """The normalised tokens after the last block, (B, N, D), the class token first."""
        return self.forward_tokens(*self.tokenize(volume, mask))

    def forward_tokens(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        """The blocks and the last norm."""
        for block in self.blocks:
            if self.grad_checkpointing and torch.is_grad_enabled():
                x_BND = checkpoint(block, x_BND, mask_BN, use_reentrant=False)
            else:
                x_BND = block(x_BND, mask_BN)
        normal_BND: Tensor = self.norm(x_BND)
        return normal_BND

    def forward_head(self, x_BND: Tensor, mask_BN: Tensor | None = None, pre_logits: bool = False) -> Tensor:
        """Pooling, and the classifier unless ``pre_logits``."""
        out: Tensor = self.head_drop(self._pooled(x_BND, mask_BN))
        if not pre_logits:
            out = self.head(out)
        return out

    def _pooled(self, x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
        if self.global_pool == "token":
            return x_BND[:, 0]
        cubes_BND = x_BND[:, 1:]
        if self.place_weight is not None:
            if cubes_BND.shape[1] != math.prod(self.grid_size):
                raise UserError(
                    f"global_pool='places' has weights for {math.prod(self.grid_size)} cubes, and this volume has "
                    f"{cubes_BND.shape[1]}: bring volumes to volume_size={tuple(self.config['volume_size'])}"
                )
            cubes_BND = cubes_BND * (1 + _PLACE_RATE * self.place_weight.flatten(0, 2)).to(x_BND.dtype)
        return _mean_of_real(cubes_BND, mask_BN)

    def tokenize(self, volume: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        """Tokens with their positions, (B, N, D), and which of them are real, (B, N); None if all are."""
        self._check(volume, mask)
        cubes_BDxyz = self.patch_embed(pad_to_cubes(volume, self.patch_size))
        grid = cubes_BDxyz.shape[2:]
        x_BND = cubes_BDxyz.flatten(2).mT + self._positions(grid).to(cubes_BDxyz.dtype)
        x_BND = torch.cat([self.cls_token.expand(volume.shape[0], -1, -1), x_BND], dim=1)
        if mask is None:
            return x_BND, None
        return x_BND, F.pad(cubes_with_voxels(mask, self.patch_size).flatten(1), (1, 0), value=True)

    def _positions(self, grid: Sequence[int]) -> Tensor:
        if self.pos_embed is None:
            return sine_cosine_positions(grid, self.embed_dim, device=self.cls_token.device)
        x, y, z = grid
        return self.pos_embed[:, :x, :y, :z].flatten(1, 3)

    def _check(self, volume: Tensor, mask: Tensor | None) -> None:
        if volume.dim() != 5 or volume.shape[1] != self.in_chans:
            raise UserError(f"volume has shape {tuple(volume.shape)}: need (B, {self.in_chans}, X, Y, Z)")
        limit = tuple(size * self.patch_size for size in self.grid_size)
        if self.pos_embed is not None and any(a > b for a, b in zip(volume.shape[2:], limit, strict=True)):
            raise UserError(
                f"a volume of {tuple(volume.shape[2:])} voxels is larger than {limit}, for which this model has "
                "positions: resample it, or build the model with a larger volume_size or pos_embed='sincos'"
            )
        if mask is not None and (mask.dtype != torch.bool or mask.shape != (len(volume), *volume.shape[2:])):
            raise UserError(
                f"mask is {mask.dtype} of shape {tuple(mask.shape)}: need torch.bool of shape "
                f"{(len(volume), *volume.shape[2:])}, True for real voxels"
            )

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must not touch."""
        return {"pos_embed", "cls_token", "place_weight"}

    def group_matcher(self, coarse: bool = False) -> dict[str, str | list[tuple[str, tuple[int] | None]]]:
        """timm's description of the layers, for layer-wise learning rates."""
        return {
            "stem": r"^cls_token|pos_embed|patch_embed",
            "blocks": [(r"^blocks\.(\d+)", None), (r"^norm", (99999,))],
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Recomputes blocks in the backward pass instead of keeping their activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer."""
        global_pool = self.global_pool if global_pool is None else global_pool
        if global_pool not in ("token", "avg", "places"):
            raise UserError(f"global_pool={global_pool!r}: use 'token', 'avg' or 'places'")
        self.num_classes, self.global_pool = num_classes, global_pool
        self.place_weight = self._place_weight() if global_pool == "places" else None
        self.head: nn.Module = nn.Linear(self.embed_dim, num_classes) if num_classes > 0 else nn.Identity()
        self.head.to(self.cls_token)

    def _place_weight(self) -> nn.Parameter:
        # Drawn, not equal: a last layer that starts at zero would learn nothing from equal ones but the mean.
        weight_xyzD = self.cls_token.new_empty(*self.grid_size, self.embed_dim)
        return nn.Parameter(weight_xyzD if weight_xyzD.is_meta else nn.init.normal_(weight_xyzD, std=1 / _PLACE_RATE))


def pad_to_cubes(volume: Tensor, patch_size: int, value: float = 0.0) -> Tensor:
    """Pads the last three axes at their ends to multiples of ``patch_size``.

    >>> pad_to_cubes(torch.ones(1, 1, 5, 4, 3), 4).shape
    torch.Size([1, 1, 8, 4, 4])
    """
    missing = [-size % patch_size for size in volume.shape[-3:]]
    return F.pad(volume, [side for amount in reversed(missing) for side in (0, amount)], value=value)


def cubes_with_voxels(mask_BXYZ: Tensor, patch_size: int) -> Tensor:
    """Which cubes hold at least one real voxel, (B, X / P, Y / P, Z / P), rounded up."""
    padded = pad_to_cubes(mask_BXYZ.unsqueeze(1).float(), patch_size)
    return F.max_pool3d(padded, patch_size).squeeze(1) > 0


def sine_cosine_positions(grid: Sequence[int], dim: int, *, device: torch.device | None = None) -> Tensor:
    """Fixed positions (1, N, D): a third of the width for each axis, half sines and half cosines of falling frequency.

    >>> sine_cosine_positions((2, 3, 4), 20).shape
    torch.Size([1, 24, 20])
    """
    num_frequencies = dim // 6
    if num_frequencies == 0:
        raise UserError(f"embed_dim={dim}: sine-cosine positions in three dimensions need at least 6")
    frequencies = 10_000 ** (-torch.arange(num_frequencies, device=device) / num_frequencies)
    axes = torch.meshgrid(*(torch.arange(size, device=device) for size in grid), indexing="ij")
    angles = torch.cat([axis.flatten().unsqueeze(1) * frequencies for axis in axes], dim=1)
    positions_ND = torch.cat([angles.sin(), angles.cos()], dim=1)
    return F.pad(positions_ND, (0, dim - positions_ND.shape[1])).unsqueeze(0)


def _mean_of_real(x_BND: Tensor, mask_BN: Tensor | None) -> Tensor:
    if mask_BN is None:
        return x_BND.mean(1)
    real_BN1 = mask_BN[:, 1:].unsqueeze(-1).to(x_BND.dtype)
    return (x_BND * real_BN1).sum(1) / real_BN1.sum(1).clamp_min(1)


class SparseVolumeBlock(SparseBlock, VolumeBlock):
    """The block with experts; padded tokens are not routed and not counted."""

    dense_class = VolumeBlock

    def forward(self, x_BND: Tensor, mask_BN: Tensor | None = None) -> Tensor:
        """``mask_BN`` is True for real tokens."""
        z_BND = self.norm1(x_BND)
        if self.needs_weights:
            attended, alpha_BNN = self.attn(z_BND, mask_BN, need_weights=True, context_grad=self.context_grad)
        else:
            attended, alpha_BNN = self.attn(z_BND, mask_BN), None
        x_BND = x_BND + self.drop_path1(attended)
        out_BND: Tensor = x_BND + self.drop_path2(self.mix(self.norm2(x_BND), alpha_BNN, attended, mask_BN))
        return out_BND


class Volume(Family):
    """The adapter of `ViT3D`."""

    sparse_block, network, library = SparseVolumeBlock, FeedForward, "ermoe's"

    def ffn(self, block: Any) -> FFN:
        mlp = block.mlp
        return FFN(up=Linear.of(mlp.fc1), down=Linear.of(mlp.fc2), act=mlp.act, norm=block.norm2, drop=mlp.drop.p)

    def num_tokens(self, model: Any) -> int:
        return int(1 + math.prod(model.grid_size))

    def image_size(self, model: Any) -> tuple[int, ...]:
        return tuple(model.config["volume_size"])

    def describe(self, model: Any) -> Json:
        """The arguments of the constructor."""
        return {**model.config, "num_classes": model.num_classes, "global_pool": model.global_pool}

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        with torch.device(device):
            return ViT3D(**description)


FAMILY = Volume()
