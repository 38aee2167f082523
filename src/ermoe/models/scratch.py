"""What a model needs that starts from scratch, where the defaults are made for pretrained weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from ermoe.models.sparsity import Options

FROM_SCRATCH: Options = {"context_of": "attention", "context_grad": False, "weight_floor": 1.0}
"""Options of the eigen router for weights that have learned nothing yet: a token is compared with what attention gave
it, attention is not bent to the routing, and no chosen expert is left without a share of the mixture."""


def from_scratch(sparsity: Options | None) -> Options | None:
    """Options of `ermoe.upcycle`, with those of `FROM_SCRATCH` for the eigen router; rivals' are left as they are.

    >>> from_scratch({"balance": "offset"})
    {'context_of': 'attention', 'context_grad': False, 'weight_floor': 1.0, 'balance': 'offset'}
    """
    if sparsity is None or sparsity.get("router", "eigen") != "eigen":
        return sparsity
    return {**FROM_SCRATCH, **sparsity}


def restart_ffns(model: nn.Module, generator: torch.Generator | None = None) -> None:
    """Gives every feed-forward network of a dense ViT Xavier-uniform weights and zero biases, in place.

    Backbones start them at a deviation of 0.02, whatever their width: in a narrow model that is a third of Xavier's,
    and it takes hundreds of steps until they do anything.
    """
    import torch  # presets name the options above, and are listed without waiting for torch

    from ermoe.models.families import family_of

    family = family_of(model)
    with torch.no_grad():
        for _, block in family.blocks(model):
            ffn = family.ffn(block)
            for linear, fresh in zip(ffn.linears(), ffn.fresh(generator).linears(), strict=True):
                linear.assign(fresh.W, fresh.b)
