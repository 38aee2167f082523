"""Image classification in Python: train a preset, evaluate and use what came out, and look into it.

>>> import ermoe.images
>>> ermoe.images.recipe("digits-ermoe").training.epochs
20
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ermoe._lazy import offer

if TYPE_CHECKING:
    from ermoe.data.images import Prediction
    from ermoe.explorer.inspect import inspect
    from ermoe.images.predicting import predict
    from ermoe.images.presets import ImageRecipe, recipe
    from ermoe.images.run import evaluate, train

__all__ = ["ImageRecipe", "Prediction", "evaluate", "inspect", "predict", "recipe", "train"]

_HOMES = {
    "ermoe.data.images": ("Prediction",),
    "ermoe.explorer.inspect": ("inspect",),
    "ermoe.images.predicting": ("predict",),
    "ermoe.images.presets": ("ImageRecipe", "recipe"),
    "ermoe.images.run": ("evaluate", "train"),
}
__getattr__, __dir__ = offer("ermoe.images", _HOMES)
