"""The adapter of a CLIP: its image tower is a timm VisionTransformer, and that is what becomes sparse."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ermoe.errors import UserError
from ermoe.models.families import timm_architecture, timm_vit
from ermoe.models.weights.rebuild import is_registered
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.presets import TextShape
from ermoe.retrieval.rivals.clip_moe import mix_text_experts

SPARSE_BLOCK = timm_vit.SPARSE_BLOCK
refusal, no_context, ffn = timm_vit.refusal, timm_vit.no_context, timm_vit.ffn


def blocks(model: Any) -> list[tuple[str, nn.Module]]:
    """The image tower's blocks with their names in the whole model."""
    return [(f"visual.trunk.{name}", block) for name, block in timm_vit.blocks(model.visual.trunk)]


def num_tokens(model: Any) -> int:
    """Length of the sequence at the model's own image size."""
    return timm_vit.num_tokens(model.visual.trunk)


def image_size(model: Any) -> tuple[int, ...]:
    """The model's own size of images."""
    return timm_vit.image_size(model.visual.trunk)


def describe(model: Any) -> dict[str, Any]:
    """Both towers in their dense form, the experts of the text tower, and how many training images it remembers."""
    image = timm_architecture.describe(model.visual.trunk)
    if is_registered(image):
        raise UserError(f"{image['architecture']} is sparse by its name: give CLIP a dense trunk, and upcycle the CLIP")
    return {
        "embed_dim": model.embed_dim,
        "image": image,
        "text": asdict(model.text.shape),
        "text_experts": model.text_experts,
        "num_training_images": len(model.trained_on),
    }


def build(description: dict[str, Any], *, device: str = "cpu") -> nn.Module:
    """The model a description means, its image tower dense, freshly initialised."""
    trunk = timm_architecture.build(description["image"], device=device)
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
