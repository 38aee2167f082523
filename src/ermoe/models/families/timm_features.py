"""timm's ``features_only=True``: a backbone inside a module that returns the features of some of its blocks."""

from __future__ import annotations

from typing import Any

from timm.models._features import FeatureGetterNet, FeatureHookNet
from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.families import timm_architecture
from ermoe.models.inside import Around

_HOLDS = {FeatureGetterNet: "model", FeatureHookNet: "body"}


class TimmFeatures(Around):
    """The backbone is a part, which says how it is sparse; timm builds the whole by name."""

    def inside(self, model: Any) -> str:
        path = _HOLDS.get(type(model))
        if path is None:
            raise UserError(
                f"timm's {type(model).__name__} takes a model apart: create it with features_only=True and "
                "feature_cls='getter'"
            )
        return path

    def backbone(self, model: Any) -> nn.Module:
        backbone: nn.Module = model.get_submodule(self.inside(model))
        return backbone

    def unsavable(self, model: Any) -> str | None:
        return timm_architecture.unsavable(model)

    def describe(self, model: Any) -> Json:
        return timm_architecture.describe(model)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        return timm_architecture.build(description, device=device)


FAMILY = TimmFeatures()
