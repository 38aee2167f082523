"""timm's ``features_only=True``: a backbone inside a module that returns the features of some of its blocks."""

from __future__ import annotations

from typing import Any

from timm.models._features import FeatureGetterNet, FeatureHookNet
from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import FFN, Family, family_of
from ermoe.models.families import timm_architecture
from ermoe.models.inside import Inside

_HOLDS = {FeatureGetterNet: "model", FeatureHookNet: "body"}


class _Features(Inside):
    """One such module: its backbone is a part, but timm builds the whole by name."""

    def unsavable(self, model: Any) -> str | None:
        return timm_architecture.unsavable(model)

    def describe(self, model: Any) -> Json:
        return timm_architecture.describe(model)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        return timm_architecture.build(description, device=device)


class TimmFeatures(Family):
    """The adapter of all of them; that of one knows what it holds."""

    def bound_to(self, model: Any) -> Family:
        path = _HOLDS.get(type(model))
        if path is None:
            raise UserError(
                f"timm's {type(model).__name__} takes a model apart: create it with features_only=True and "
                "feature_cls='getter'"
            )
        return _Features(path, family_of(model[path] if path == "body" else model.model))

    def ffn(self, block: Any) -> FFN:
        raise AssertionError("asked of all modules of features, and not of one")

    def num_tokens(self, model: Any) -> int:
        return self.bound_to(model).num_tokens(model)

    def image_size(self, model: Any) -> tuple[int, ...]:
        return self.bound_to(model).image_size(model)

    def describe(self, model: Any) -> Json:
        return timm_architecture.describe(model)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        return timm_architecture.build(description, device=device)


FAMILY = TimmFeatures()
