"""Hugging Face's wrapper of timm's models: TimmWrapperModel and TimmWrapperForImageClassification."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.timm_wrapper import modeling_timm_wrapper

from ermoe.files import Json
from ermoe.models.families import timm_architecture
from ermoe.models.families.hugging_face_vit import HuggingFace, build, classes_of, describe
from ermoe.models.inside import Around


class HuggingFaceTimm(HuggingFace, Around):
    """The backbone is the timm model inside."""

    def inside(self, model: Any) -> str:
        return "timm_model"

    def describe(self, model: Any) -> Json:
        """The class and its configuration."""
        return describe(model, whole=True)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        config = description["config"]
        # Refuses addresses of other models and arguments that would load files.
        timm_architecture.build(
            {"architecture": config["architecture"], "args": config.get("model_args") or {}}, device="meta"
        )
        return build(classes_of(modeling_timm_wrapper), description, device=device)


FAMILY = HuggingFaceTimm()
