"""MONAI's 3D Swin transformer with a classifier on the mean of its last map."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from ermoe.errors import UserError, library
from ermoe.files import Json, to_json


class Swin3D(nn.Module):
    """Windows of attention that shift and merge; the classifier reads the mean of the deepest map.

    Args:
        num_classes: outputs.
        embed_dim: width of the first stage; every stage doubles it.
        patch_size: edge of a patch in voxels.
        window_size: edge of an attention window in patches.
        depths, num_heads: of the four stages.
        drop_path_rate: of the deepest block.
    """

    def __init__(
        self,
        *,
        num_classes: int = 40,
        in_chans: int = 1,
        embed_dim: int = 24,
        patch_size: int = 4,
        window_size: int = 4,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        drop_path_rate: float = 0.1,
    ) -> None:
        super().__init__()
        if len(depths) != 4 or len(num_heads) != 4:
            raise UserError(f"depths={tuple(depths)}, num_heads={tuple(num_heads)}: MONAI's Swin has four stages")
        shared = {"in_chans": in_chans, "embed_dim": embed_dim, "drop_path_rate": drop_path_rate}
        stages = {"depths": tuple(depths), "num_heads": tuple(num_heads)}
        sizes = {"patch_size": patch_size, "window_size": window_size}
        self.config: Json = to_json({**shared, **stages, **sizes})
        self.num_classes = num_classes
        cubes = {name: (edge,) * 3 for name, edge in sizes.items()}
        monai = library("monai.networks.nets.swin_unetr", "the 3D Swin transformer is MONAI's", "brain")
        self.swin = monai.SwinTransformer(**shared, **stages, **cubes, spatial_dims=3)
        width = embed_dim * 2 ** len(depths)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, num_classes)

    def forward(self, volume: Tensor, mask: Tensor | None = None) -> Tensor:
        """Outputs (B, num_classes) of volumes (B, C, X, Y, Z); windows have no use for the mask."""
        deepest = self.swin(volume)[-1]
        return self.head(self.norm(deepest.mean((2, 3, 4))))
