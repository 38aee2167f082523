"""Brain age in Python: ``ermoe.brain.predict(MODEL, "scan.nii.gz")``; research use only.

>>> import ermoe.brain
>>> ermoe.brain.recipe("small-ermoe").training.epochs
16
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ermoe._lazy import offer

if TYPE_CHECKING:
    from ermoe.brain.model import Prediction
    from ermoe.brain.recipes import BrainRecipe, recipe
    from ermoe.brain.reporting.page import report
    from ermoe.brain.use import Estimator, evaluate, load, predict, train
    from ermoe.explorer.inspect import inspect

__all__ = [
    "BrainRecipe", "Estimator", "Prediction", "evaluate", "inspect", "load", "predict", "recipe", "report", "train",
]  # fmt: skip

_HOMES = {
    "ermoe.brain.model": ("Prediction",),
    "ermoe.brain.recipes": ("BrainRecipe", "recipe"),
    "ermoe.brain.reporting.page": ("report",),
    "ermoe.brain.use": ("Estimator", "evaluate", "load", "predict", "train"),
    "ermoe.explorer.inspect": ("inspect",),
}
__getattr__, __dir__ = offer("ermoe.brain", _HOMES)
