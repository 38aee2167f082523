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
from ermoe.files import Json
from ermoe.models.backbones import FFN, Family, Linear, SparseBlock, children_at


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


class HuggingFaceViT(Family):
    """Blocks are layers of the base model. The dropout of their feed-forward networks stays with them."""

    sparse_block, network, library = SparseViTLayer, ViTMLP, "transformers'"

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        prefix = "" if model.base_model is model else f"{model.base_model_prefix}."
        return children_at(model, f"{prefix}layers")

    def ffn(self, block: Any) -> FFN:
        mlp = block.mlp
        return FFN(up=Linear.of(mlp.fc1), down=Linear.of(mlp.fc2), act=mlp.activation_fn, norm=block.layernorm_after)

    def num_tokens(self, model: Any) -> int:
        return int(model.base_model.embeddings.position_embeddings.shape[1])

    def image_size(self, model: Any) -> tuple[int, ...]:
        return tuple(model.base_model.embeddings.patch_embeddings.image_size)

    def describe(self, model: Any) -> Json:
        """The class and its configuration."""
        return {"class": type(model).__name__, "config": model.config.to_diff_dict()}

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        name, known = description["class"], modeling_vit.__all__
        if name not in known:
            raise UserError(f"{name} is none of transformers' ViT classes: {', '.join(known)}")
        config = ViTConfig.from_dict(description["config"])
        attention = config._attn_implementation
        if attention not in (None, "eager", "sdpa"):  # any other name may be that of a repository
            raise UserError(f"attn_implementation={attention!r}: write 'eager' or 'sdpa' into config.json")
        with torch.device(device):
            model: nn.Module = getattr(modeling_vit, name)(config)
        return model


FAMILY = HuggingFaceViT()
