"""The adapter of a CLIP: its image tower is a timm VisionTransformer, and that is what becomes sparse."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import children_at
from ermoe.models.families.timm_vit import TimmViT
from ermoe.models.io import is_registered
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.presets import TextShape
from ermoe.retrieval.rivals.clip_moe import mix_text_experts


class ClipFamily(TimmViT):
    """Its blocks are those of the trunk of the image tower."""

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        return children_at(model, "visual.trunk.blocks")

    def num_tokens(self, model: Any) -> int:
        return super().num_tokens(model.visual.trunk)

    def image_size(self, model: Any) -> tuple[int, ...]:
        return super().image_size(model.visual.trunk)

    def describe(self, model: Any) -> Json:
        """Both towers in their dense form, the experts of the text tower, and how many training images it remembers."""
        image = super().describe(model.visual.trunk)
        if is_registered(image):
            raise UserError(
                f"{image['architecture']} is sparse by its name: give CLIP a dense trunk, and upcycle the CLIP"
            )
        return {
            "embed_dim": model.embed_dim,
            "image": image,
            "text": asdict(model.text.shape),
            "text_experts": model.text_experts,
            "num_training_images": len(model.trained_on),
        }

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        trunk = super().build(description["image"], device=device)
        with torch.device(device):
            model = CLIP(
                trunk,
                TextShape(**description["text"]),
                description["embed_dim"],
                num_training_images=description["num_training_images"],
            )
        if description["text_experts"] is not None:
            mix_text_experts(model, init="empty" if device == "meta" else "dense", **description["text_experts"])
        return model


FAMILY = ClipFamily()
