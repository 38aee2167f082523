"""Hugging Face's ViT: ViTModel, ViTForImageClassification and ViTForMaskedImageModeling of transformers 5.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import ViTConfig
from transformers.models.vit import modeling_vit
from transformers.models.vit.modeling_vit import ViTLayer, ViTMLP

from ermoe.errors import UserError
from ermoe.models.families import named_blocks
from ermoe.models.ffn import FFN, Linear
from ermoe.models.sparse_block import SparseBlock
from ermoe.plain import Json


class SparseViTLayer(SparseBlock, ViTLayer):
    """Hugging Face's ViT layer with experts."""

    dense_class = ViTLayer

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        attended, alpha_BNN = self._attention(self.layernorm_before(hidden_states), attention_mask, **kwargs)
        x = hidden_states + self.dropout(attended)
        out: Tensor = x + self.dropout(self.mix(self.layernorm_after(x), alpha_BNN, attended))
        return out

    def _attention(self, x_BND: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        attn = self.attention
        dropout = attn.attention_dropout if self.training else 0.0
        # The eager implementation shows its weights, after dropout, and so does output_attentions=True.
        if not self.needs_weights or (attn.config._attn_implementation == "eager" and dropout == 0):
            attended, weights_BhNN = attn(x_BND, mask, **kwargs)
            if not self.needs_weights:
                return attended, None
            alpha_BNN = weights_BhNN.mean(1)
            return attended, alpha_BNN if self.context_grad else alpha_BNN.detach()
        q, k, v = (
            projection(x_BND).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        if mask is not None and mask.dim() == 2:  # flash attention's form: which keys are real
            mask = mask.bool()[:, None, None, :]
        out, alpha_BNN = self.attend(q, k, v, bias=mask, scale=attn.scaling, dropout=dropout)
        return attn.o_proj(out.transpose(1, 2).flatten(2)), alpha_BNN


SPARSE_BLOCK = SparseViTLayer


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The transformer blocks with their names."""
    prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
    return list(named_blocks(model, f"{prefix}layers"))


def refusal(block: Any) -> str | None:
    """Why this block cannot be made sparse; None if it can."""
    if type(block) is not ViTLayer:
        return f"it is a {type(block).__name__}, not transformers' ViTLayer"
    if type(block.mlp) is not ViTMLP:
        return f"its feed-forward network is a {type(block.mlp).__name__}, not transformers' ViTMLP"
    return None


def no_context(block: Any) -> str | None:
    """None: every block of this family can say where its tokens looked."""
    return None


def ffn(block: Any) -> FFN:
    """The block's dense feed-forward network. Its dropout stays with the block."""
    mlp = block.mlp
    return FFN(up=Linear.of(mlp.fc1), down=Linear.of(mlp.fc2), act=mlp.activation_fn, norm=block.layernorm_after)


def num_tokens(model: Any) -> int:
    """Length of the sequence at the model's own image size."""
    return int(model.base_model.embeddings.position_embeddings.shape[1])


def image_size(model: Any) -> tuple[int, ...]:
    """The model's own size of images."""
    return tuple(model.base_model.embeddings.patch_embeddings.image_size)


def describe(model: Any) -> Json:
    """The class and its configuration."""
    return {"class": type(model).__name__, "config": model.config.to_diff_dict()}


def build(description: Json, *, device: str = "cpu") -> nn.Module:
    """The dense model a description means, freshly initialised."""
    name = description["class"]
    if name not in modeling_vit.__all__:
        raise UserError(f"{name} is none of transformers' ViT classes: {', '.join(modeling_vit.__all__)}")
    config = ViTConfig.from_dict(description["config"])
    if config._attn_implementation not in (None, "eager", "sdpa"):  # any other name may be that of a repository
        raise UserError(
            f"attn_implementation={config._attn_implementation!r}: write 'eager' or 'sdpa' into config.json"
        )
    with torch.device(device):
        model: nn.Module = getattr(modeling_vit, name)(config)
    return model
