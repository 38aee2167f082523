"""The symmetric contrastive loss over one process or many.

Letters: B pairs of this process, G pairs of all processes, D width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


def contrastive_loss(
    image_BD: Tensor, text_BD: Tensor, scale: Tensor | float, *, label_smoothing: float = 0.0
) -> Tensor:
    """Half the cross-entropy of each image among all texts plus half that of each text among all images.

    Features have unit length; ``scale`` is the inverse temperature. With several processes every one holds its own
    pairs and meets the features of all; the mean over processes, which is what DDP and FSDP take of gradients, is
    the loss of one large batch, and so are its gradients.

    >>> pair = torch.eye(2)
    >>> round(float(contrastive_loss(pair, pair, 1.0)), 4)
    0.3133
    """
    rank = dist.get_rank() if _is_shared() else 0
    target_B = torch.arange(len(image_BD), device=image_BD.device) + rank * len(image_BD)
    image_GD, text_GD = gather(image_BD), gather(text_BD)
    # At least float32: under autocast, half-precision logits of a large scale lose the small differences.
    with torch.autocast(image_BD.device.type, enabled=False):
        from_image_BG = scale * _wide(image_BD) @ _wide(text_GD).mT
        from_text_BG = scale * _wide(text_BD) @ _wide(image_GD).mT
        losses = [
            F.cross_entropy(logit_BG, target_B, label_smoothing=label_smoothing)
            for logit_BG in (from_image_BG, from_text_BG)
        ]
        return (losses[0] + losses[1]) / 2


def gather(feature_BD: Tensor) -> Tensor:
    """The features of all processes in the order of their ranks, (G, D); gradients find their way back."""
    return _Gather.apply(feature_BD) if _is_shared() else feature_BD


class _Gather(torch.autograd.Function):
    """Every process used every feature, so a feature's gradient is the sum of what all processes ask of it."""

    @staticmethod
    def forward(ctx: Any, feature_BD: Tensor) -> Tensor:
        ctx.size = len(feature_BD)
        parts = [torch.empty_like(feature_BD) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, feature_BD.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        grad_GD = grads[0].clone()
        dist.all_reduce(grad_GD)
        return grad_GD[dist.get_rank() * ctx.size : (dist.get_rank() + 1) * ctx.size]


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _wide(feature: Tensor) -> Tensor:
    return feature if feature.dtype == torch.float64 else feature.float()
