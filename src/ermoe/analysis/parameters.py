"""How many parameters a model has, and how many of them a token meets."""

from __future__ import annotations

from torch import nn

from ermoe.analysis.recorder import moe_layers
from ermoe.analysis.summary import routing_basis


def total_parameters(model: nn.Module) -> int:
    """All parameters.

    >>> total_parameters(nn.Linear(3, 2))
    8
    """
    return sum(parameter.numel() for parameter in model.parameters())


def active_parameters(model: nn.Module) -> int:
    """The parameters one token meets: all that is dense, K of the E experts, and everything it is scored with.

    A router that borrows the experts' bases reads the routing columns of all E experts, so those of the others count
    too. A layer without a fixed K (soft, expert choice) counts whole.

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(16, 32, num_experts=4, top_k=1, score="logit", experts="dense")
    >>> total_parameters(layer) - active_parameters(layer) == 3 * (16 * 32 + 32 + 32 * 16 + 16)
    True
    """
    idle = 0
    for layer in moe_layers(model).values():
        num_experts = layer.experts.num_experts
        top_k = getattr(getattr(layer, "router", None), "top_k", num_experts)
        unchosen = num_experts - top_k
        idle += total_parameters(layer.experts) // num_experts * unchosen
        basis_EDr = routing_basis(layer)
        if basis_EDr is not None and layer.router.score.basis is None:
            idle -= unchosen * basis_EDr[0].numel()
    return total_parameters(model) - idle
