"""Backbones: making dense ones sparse, building sparse ones, and their weights."""

from ermoe.models import vit as _registered_with_timm  # noqa: F401
