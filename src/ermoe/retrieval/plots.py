"""Pictures of a retrieval: how soon queries find their match, and how far right pairs stand out from wrong ones.

Letters: I images, T texts, D width, B bins.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray
from torch import Tensor

from ermoe.analysis.plots import ACCENT, LINE, MUTED, style
from ermoe.retrieval.figures import Retrieval

_WARM = "#c8553d"
_SAMPLED = 1000


def rank_curves(retrieval: Retrieval) -> Figure:
    """The share of queries that are answered within the first k, for every k, beside a random order.

    Ties count against the model; k is on a logarithmic axis.
    """
    with style():
        drawing = Figure(figsize=(4.1, 3.1), layout="constrained")
        axes = drawing.subplots()
        dashed: Any = {"linewidth": 1, "linestyle": (0, (3, 3))}
        for side, (name, ranks, colour) in enumerate(
            (("image → text", retrieval.image_to_text, ACCENT), ("text → image", retrieval.text_to_image, _WARM))
        ):
            rank_Q = np.sort(ranks.zero_based().numpy())
            cuts = np.unique(np.geomspace(1, ranks.num_candidates, 60).astype(int))
            share = np.searchsorted(rank_Q, cuts - 1, side="right") / len(rank_Q)
            axes.plot(cuts, 100 * share, color=colour, linewidth=1.8, label=name)
            chance = [100 * retrieval.chance(int(k))[side] for k in cuts[cuts <= 1000]]
            axes.plot(cuts[: len(chance)], chance, color=colour, **dashed)
        axes.plot([], [], color=MUTED, label="random order", **dashed)
        axes.set_xscale("log")
        axes.set_ylim(0, 100)
        axes.set_xlabel("first k candidates")
        axes.set_ylabel("queries answered, %")
        axes.grid(color=LINE, linewidth=0.5, alpha=0.6)
        axes.legend(loc="upper left", handlelength=1.6, borderaxespad=0.3)
    return drawing


def similarity_histogram(image_ID: Tensor, text_TD: Tensor, text_to_image_T: Tensor) -> Figure:
    """Cosines of right pairs and of wrong ones; wrong ones are those of at most 1,000 images, evenly spaced."""
    right, wrong, edge = similarities(image_ID, text_TD, text_to_image_T)
    with style():
        drawing = Figure(figsize=(4.1, 2.7), layout="constrained")
        axes = drawing.subplots()
        for name, count, colour in (("wrong pairs", wrong, MUTED), ("right pairs", right, ACCENT)):
            share = count / max(count.sum(), 1)
            axes.stairs(share, edge, fill=True, color=colour, alpha=0.22)
            axes.stairs(share, edge, color=colour, linewidth=1.3, label=name)
        seen = edge[:-1][(right + wrong) > 0]
        axes.set_xlim(seen.min() - 0.05, seen.max() + 0.07)
        axes.set_ylim(0, 1.1 * axes.get_ylim()[1])
        axes.set_yticks([])
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("cosine similarity")
        axes.legend(loc="upper left", handlelength=1.2, borderaxespad=0)
    return drawing


def similarities(
    image_ID: Tensor, text_TD: Tensor, text_to_image_T: Tensor, *, bins: int = 100
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Histograms (B,) of right and of wrong pairs, and the edges of the bins (B + 1,) from −1 to 1."""
    edge = np.linspace(-1, 1, bins + 1)
    right_T = (image_ID[text_to_image_T] * text_TD).sum(-1).clamp(-1, 1)
    right = np.histogram(right_T.numpy(), edge)[0].astype(float)
    wrong = np.zeros(bins)
    for image in range(0, len(image_ID), -(-len(image_ID) // _SAMPLED)):
        score_T = (text_TD @ image_ID[image])[text_to_image_T != image].clamp(-1, 1)
        wrong += torch.histc(score_T.float(), bins, -1, 1).numpy()
    return right, wrong, edge
