"""ERMoE towers for open_clip itself: ``open_clip.create_model("ERMoE-B-16")``."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import open_clip

import ermoe.models.vit  # noqa: F401 (its import tells timm of the towers)

NAMES = ("ERMoE-Ti-16", "ERMoE-S-16", "ERMoE-B-16")


def register_with_open_clip() -> tuple[str, ...]:
    """Adds the model configurations of this package to open_clip's list; returns their names.

    open_clip's own trainer decays weights by the number of their axes; give `ermoe.no_weight_decay` to yours.

    >>> set(register_with_open_clip()) <= set(open_clip.list_models())
    True
    """
    if not set(NAMES) <= set(open_clip.list_models()):
        open_clip.add_model_config(Path(str(files("ermoe.retrieval.clip") / "open_clip_models")))
    return NAMES
