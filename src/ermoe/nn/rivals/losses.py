"""Auxiliary losses of learned gates, and how a training step gets hold of them without any global state.

The three losses are V-MoE's, each per group. CV²(v) is the population variance of v over its squared mean; it is
written without a square root, whose gradient is undefined where loads are equal.

Letters: G groups of S tokens, E experts, A pairs of token and expert.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ermoe.nn.order import is_one_of, stable_top_k
from ermoe.nn.rivals.router import RivalRouter


def importance_loss(gate_GSE: Tensor, mask_GS: Tensor | None = None) -> Tensor:
    """CV² over experts of Σ_tokens gate, (G,). V-MoE takes the gates without noise.

    >>> importance_loss(torch.tensor([[[0.75, 0.25], [0.25, 0.75]], [[1.0, 0.0], [1.0, 0.0]]])).tolist()
    [0.0, 1.0]
    """
    return _squared_variation(_real(gate_GSE, mask_GS).sum(1))


def load_loss(
    clean_GSE: Tensor, noisy_GSE: Tensor, noise_std: float, top_k: int, mask_GS: Tensor | None = None
) -> Tensor:
    """CV² over experts of the expected load, (G,): the chance of each expert to be chosen if noise were drawn anew.

    P(chosen) = 1 − Φ((τ − l) / σ) with clean logits l, and τ the token's K-th largest noisy logit. Gradients flow
    through both.
    """
    kth_GS1 = stable_top_k(noisy_GSE.detach().flatten(0, 1), top_k)[:, -1:].view(*noisy_GSE.shape[:2], 1)
    threshold_GS1 = noisy_GSE.gather(-1, kth_GS1)
    chance_GSE = torch.special.ndtr((clean_GSE - threshold_GS1) / noise_std)
    return _squared_variation(_real(chance_GSE, mask_GS).sum(1))


def gshard_loss(gate_GSE: Tensor, mask_GS: Tensor | None = None) -> Tensor:
    """E Σ_e f_e m_e, (G,): f_e the share of tokens whose best expert is e (a constant), m_e its mean gate."""
    num_experts = gate_GSE.shape[-1]
    best_GSE = is_one_of(gate_GSE.argmax(-1), num_experts).to(gate_GSE.dtype)
    count_G1 = _real(torch.ones_like(gate_GSE[..., :1]), mask_GS).sum(1).clamp_min(1)
    share_GE, mean_GE = (_real(part, mask_GS).sum(1) / count_G1 for part in (best_GSE, gate_GSE))
    return num_experts * (share_GE * mean_GE).sum(-1)


def mean_over_groups(loss_G: Tensor, mask_GS: Tensor | None = None) -> Tensor:
    """The mean over groups that hold a real token; 0 if none does."""
    if mask_GS is None:
        return loss_G.sum() / max(len(loss_G), 1)
    return loss_G.sum() / mask_GS.any(1).sum().clamp_min(1)


def _squared_variation(total_GE: Tensor) -> Tensor:
    mean_G1 = total_GE.mean(-1, keepdim=True)
    scale_G1 = torch.where(mean_G1 > 0, mean_G1, 1)  # a group without tokens has no variation
    return ((total_GE - mean_G1) / scale_G1).square().mean(-1)


def _real(value_GSE: Tensor, mask_GS: Tensor | None) -> Tensor:
    return value_GSE if mask_GS is None else value_GSE * mask_GS.unsqueeze(-1)


def auxiliary_loss(model: nn.Module) -> Tensor:
    """Σ over layers of the weighted auxiliary losses of the last forward pass, a differentiable scalar; 0 without any.

    Call it after the forward pass and add it to the task loss, once for every backward pass. It forgets what it
    returns. Forward passes in evaluation mode leave none.

    >>> from ermoe.nn.registry import build_layer
    >>> layer = build_layer("v-moe", 16, num_experts=4)
    >>> _ = layer(torch.randn(2, 9, 16))
    >>> bool(auxiliary_loss(layer) > 0), float(auxiliary_loss(layer))
    (True, 0.0)
    """
    pulled = [module.pull() for module in model.modules() if isinstance(module, RivalRouter)]
    losses = [loss for loss in pulled if loss is not None]
    return torch.stack(losses).sum() if losses else torch.zeros(())
