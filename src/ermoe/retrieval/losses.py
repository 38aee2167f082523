"""The symmetric contrastive loss over one process or many, and what it is taken of: CLIP's pairs and its rivals'.

Letters: B pairs of this process, G pairs of all processes, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from ermoe.retrieval.rivals.long_clip import primary_components


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
    image_GD, text_GD = _gathered(image_BD), _gathered(text_BD)
    # At least float32: under autocast, half-precision logits of a large scale lose the small differences.
    with torch.autocast(image_BD.device.type, enabled=False):
        from_image_BG = scale * _wide(image_BD) @ _wide(text_GD).mT
        from_text_BG = scale * _wide(text_BD) @ _wide(image_GD).mT
        losses = [
            F.cross_entropy(logit_BG, target_B, label_smoothing=label_smoothing)
            for logit_BG in (from_image_BG, from_text_BG)
        ]
        return (losses[0] + losses[1]) / 2


def _gathered(feature_BD: Tensor) -> Tensor:
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


@dataclass(frozen=True, slots=True)
class Objective:
    """From the features of a batch to the pairs that are contrasted.

    With ``needs_long`` each image comes with a long text, all its captions joined, before a short one; with
    ``masked_share`` each image passes a second time with that share of its patches left out.
    """

    pairs: Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
    needs_long: bool = False
    masked_share: float = 0.0


def _plain(image_BD: Tensor, text_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(image_BD, text_BD)]


def _long_clip(image_BD: Tensor, text_2BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Images with long texts, their primary components with short ones."""
    long_BD, short_BD = text_2BD.chunk(2)
    return [(image_BD, long_BD), (primary_components(image_BD), short_BD)]


def _fix_clip_style(image_2BD: Tensor, text_2BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Whole images with long texts, images of which patches are left out with short ones.

    In the style of Fix-CLIP (Wang et al. 2025), whose code was never released. Its regional prompt tokens, its
    alignment of intermediate layers and its 30 M recaptioned images are not part of this, and its mask ratio is not
    known: figures of this variant are not Fix-CLIP's.
    """
    (whole_BD, masked_BD), (long_BD, short_BD) = image_2BD.chunk(2), text_2BD.chunk(2)
    return [(whole_BD, long_BD), (masked_BD, short_BD)]


OBJECTIVES = {
    "clip": Objective(_plain),
    "clip-moe": Objective(_plain),
    "long-clip": Objective(_long_clip, needs_long=True),
    "fix-clip-style": Objective(_fix_clip_style, needs_long=True, masked_share=0.5),
}
"""By the variant of a recipe."""
