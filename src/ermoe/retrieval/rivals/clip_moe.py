"""CLIP-MoE after its description (Zhang et al. 2024): experts in every block of both towers, and a gate to train.

The experts start as the feed-forward networks of one CLIP (upcycling), or of several that were fine-tuned one after
another, each on batches from one cluster of the joint features (`joint_clusters`, `train_only_mlps`). Then only the
gates learn (`train_only_gates`), with label smoothing 0.1 and a balancing loss of weight 0.01. Two things differ from
their code: balance is asked of every layer by itself, where theirs adds up experts of equal number over all layers; and
experts have no dropout.

Letters: G groups (images or texts) of S tokens, T = G·S tokens, E experts, K experts per token, N pairs, D width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.eigen_init import fill_from_dense
from ermoe.models.upcycle import Sparsity, upcycle
from ermoe.nn.ffn import FFN, Linear

_ROUTER = "clip-moe"


def clip_moe(
    base: Any,
    *,
    num_experts: int = 4,
    top_k: int = 2,
    stages: Sequence[Any] = (),
    generator: torch.Generator | None = None,
) -> Any:
    """A new CLIP with experts in every block of both towers.

    Without ``stages`` all experts are the base's own feed-forward networks, and the outputs the base's; otherwise
    expert e is that of ``stages[e]``, of which there must be ``num_experts``.
    """
    if stages and len(stages) != num_experts:
        raise UserError(f"{len(stages)} stages cannot be {num_experts} experts: give one model for each expert")
    model = upcycle(base, num_experts=num_experts, top_k=top_k, blocks="all", router=_ROUTER, generator=generator)
    mix_text_experts(model, num_experts=num_experts, top_k=top_k, generator=generator)
    for expert, stage in enumerate(stages):
        _write_expert(model, expert, stage)
    return model


def mix_text_experts(
    model: Any,
    *,
    num_experts: int = 4,
    top_k: int = 2,
    router: str = _ROUTER,
    init: str = "dense",
    generator: torch.Generator | None = None,
) -> None:
    """Puts experts that equal the dense network into every block of the text tower, in place.

    Text blocks have no attention context to offer, so the router must be one that needs none.
    """
    if model.text_experts is not None:
        raise UserError("the text tower has experts already: start from a dense one")
    sparsity = Sparsity(blocks=(), num_experts=num_experts, top_k=top_k, router=router)
    for block in model.text.transformer.resblocks:
        ffn = _text_ffn(block)
        layer = sparsity.layer_like(ffn)
        if init == "dense":
            layer.to_empty(device=ffn.up.W.device)
            layer.reset_router(generator)
            fill_from_dense(layer, ffn)
        block.mlp = layer.train(block.training)
    model.text_experts = {"num_experts": num_experts, "top_k": top_k, "router": router}


def _text_ffn(block: Any) -> FFN:
    return FFN(Linear.of(block.mlp.c_fc), Linear.of(block.mlp.c_proj), block.mlp.gelu, block.ln_2)


@torch.no_grad()
def _write_expert(model: Any, expert: int, stage: Any) -> None:
    """Expert ``expert`` of every layer becomes the feed-forward network of the same block of a dense ``stage``."""
    from ermoe.models.families.timm_vit import FAMILY

    for (_, block), (_, dense) in zip(
        FAMILY.blocks(model.visual.trunk), FAMILY.blocks(stage.visual.trunk), strict=True
    ):
        _copy_into(block.mlp, expert, FAMILY.ffn(dense))
    for block, dense in zip(model.text.transformer.resblocks, stage.text.transformer.resblocks, strict=True):
        _copy_into(block.mlp, expert, _text_ffn(dense))


def _copy_into(layer: Any, expert: int, ffn: FFN) -> None:
    for stacked, dense in zip(layer.experts.linears(), ffn.linears(), strict=True):
        stacked.W[expert].copy_(dense.W)
        if dense.b is not None:
            stacked.bias[expert].copy_(dense.b)


def train_only_gates(model: nn.Module) -> list[str]:
    """Lets nothing but the gates learn; returns their names."""
    return _train_only(model, ".mlp.router.gate.")


def train_only_mlps(model: nn.Module) -> list[str]:
    """Lets nothing but the feed-forward networks learn, as in the stages from which experts are made."""
    return _train_only(model, ".mlp.")


def _train_only(model: nn.Module, part: str) -> list[str]:
    chosen = []
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(part in name)
        chosen += [name] if part in name else []
    if not chosen:
        raise UserError(f"this {type(model).__name__} has no parameter called *{part}*: give the model that has")
    return chosen


def joint_clusters(image_ND: Tensor, text_ND: Tensor, *, per_side: int = 3, seed: int = 0) -> Tensor:
    """The cluster of each pair, (N,): K-means of image features times K-means of text features.

    >>> feature = torch.eye(3).repeat(4, 1)
    >>> joint_clusters(feature, feature).unique().numel()
    3
    """
    from sklearn.cluster import KMeans  # which takes seconds to import

    if len(image_ND) < per_side:
        raise UserError(f"{len(image_ND)} pairs cannot be {per_side} clusters: give at least one pair a cluster")
    image_N, text_N = (
        torch.from_numpy(KMeans(per_side, n_init=4, random_state=seed).fit_predict(feature.cpu().numpy())).long()
        for feature in (image_ND, text_ND)
    )
    return image_N * per_side + text_N
