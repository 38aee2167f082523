"""Long-CLIP (Zhang et al. 2024): a text tower for 248 tokens, short texts matched with primary components of images.

Letters: B pairs, L positions, D width.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError

_LENGTH, _KEPT, _COMPONENTS = 248, 20, 32


def stretched(position_LD: Tensor, length: int = _LENGTH, kept: int = _KEPT) -> Tensor:
    """Position embeddings for ``length`` tokens: the first ``kept`` as they are, the others interpolated linearly.

    From 77 positions, 57 become 4 each. What lies beyond the last one continues its last step.

    >>> stretched(torch.tensor([[0.0], [1.0], [2.0], [4.0]]), length=7, kept=1).squeeze().tolist()
    [0.0, 1.0, 1.5, 2.0, 3.0, 4.0, 5.0]
    """
    old = len(position_LD)
    if not 0 <= kept <= old - 2 or length <= old or (length - kept) % (old - kept):
        raise UserError(
            f"{old} positions cannot be stretched to {length} with {kept} kept: {length} − {kept} must be a multiple "
            f"of {old} − {kept}"
        )
    times = (length - kept) // (old - kept)
    moved_LD = position_LD[kept:]
    step_LD = torch.cat([moved_LD.diff(dim=0), moved_LD[-1:] - moved_LD[-2:-1]])
    fraction = torch.arange(times, dtype=position_LD.dtype, device=position_LD.device).view(1, -1, 1) / times
    between = moved_LD.unsqueeze(1) + fraction * step_LD.unsqueeze(1)
    return torch.cat([position_LD[:kept], between.flatten(0, 1)])


def stretch_positions(model: Any) -> Any:
    """Gives a CLIP's text tower 248 positions, in place; the first 20 of them no longer learn."""
    text = model.text
    text.positional_embedding = nn.Parameter(stretched(text.positional_embedding.detach()))
    text.shape = replace(text.shape, context_length=_LENGTH)
    text.num_pos = text.context_length = model.context_length = _LENGTH
    text.positional_embedding.register_hook(_without_first)
    return model


def _without_first(grad_LD: Tensor) -> Tensor:
    """No gradient for the first positions. They do not decay either: position embeddings never do."""
    grad_LD = grad_LD.clone()
    grad_LD[:_KEPT] = 0
    return grad_LD


def primary_components(feature_BD: Tensor, num: int = _COMPONENTS) -> Tensor:
    """Features without all but the first principal components of their batch, (B, D), of unit length.

    The directions count as constants: the gradient of a singular value decomposition has no bound where two singular
    values meet.
    """
    mean_D = feature_BD.mean(0)
    centred_BD = feature_BD - mean_D
    with torch.no_grad():
        direction_CD = torch.linalg.svd(centred_BD.float(), full_matrices=False).Vh[:num].to(feature_BD.dtype)
    return nn.functional.normalize(mean_D + (centred_BD @ direction_CD.mT) @ direction_CD, dim=-1)
