"""Image–text retrieval in Python: train a preset, rank under a named protocol, search, name what images show.

>>> import ermoe.retrieval
>>> ermoe.retrieval.recipe("small-ermoe").embed_dim
128
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ermoe._lazy import offer

if TYPE_CHECKING:
    from ermoe.data.images import Prediction
    from ermoe.explorer.inspect import inspect
    from ermoe.retrieval.build import load_clip
    from ermoe.retrieval.evaluation import Evaluation, evaluate
    from ermoe.retrieval.index import Index, build_index, open_index
    from ermoe.retrieval.predicting import predict
    from ermoe.retrieval.presets import RetrievalRecipe, recipe
    from ermoe.retrieval.run import train

__all__ = [
    "Evaluation", "Index", "Prediction", "RetrievalRecipe", "build_index", "evaluate", "inspect", "load_clip",
    "open_index", "predict", "recipe", "train",
]  # fmt: skip

_HOMES = {
    "ermoe.data.images": ("Prediction",),
    "ermoe.explorer.inspect": ("inspect",),
    "ermoe.retrieval.build": ("load_clip",),
    "ermoe.retrieval.evaluation": ("Evaluation", "evaluate"),
    "ermoe.retrieval.index": ("Index", "build_index", "open_index"),
    "ermoe.retrieval.predicting": ("predict",),
    "ermoe.retrieval.presets": ("RetrievalRecipe", "recipe"),
    "ermoe.retrieval.run": ("train",),
}
__getattr__, __dir__ = offer("ermoe.retrieval", _HOMES)
