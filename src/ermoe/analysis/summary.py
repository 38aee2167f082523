"""From totals to figures: every measure of every layer by one name, with the words that explain it.

Letters: T tokens, E experts, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.analysis.tally import Tally
from ermoe.nn import MixtureLayer
from ermoe.nn.basis import orthonormality_error
from ermoe.nn.orthogonality import bases
from ermoe.nn.sharding import whole

Summary = dict[str, dict[str, float]]
"""{layer name: {measure: value}}; NaN where a router has no such notion."""


@dataclass(slots=True, frozen=True)
class Measure:
    """How a measure is called, printed and explained, and what stands for all layers: the largest, or the mean."""

    label: str
    meaning: str
    style: str = ".3f"
    overall: Callable[[list[float]], float] = max

    def text(self, value: float) -> str:
        """The value as a table shows it; a dash where the measure has no meaning."""
        return "–" if math.isnan(value) else format(value, self.style)


MEASURES: Mapping[str, Measure] = {
    "tokens": Measure("tokens", "Real tokens seen; padding counts nowhere.", ",.0f"),
    "load_cv2": Measure(
        "load CV²",
        "Variance of the experts' token counts over their squared mean: 0 is equal load, E − 1 is one expert.",
        ".4f",
    ),
    "weight_cv2": Measure(
        "weight CV²", "The same of the experts' mixing weights, which idle picks cannot flatter.", ".4f"
    ),
    "max_load": Measure("max load", "The busiest expert's count over the mean.", ".2f"),
    "fallback_rate": Measure("fallback", "Tokens whose best score is below the threshold T.", ".1%", fmean),
    "tail_mass": Measure("tail mass", "Weight above T that lies beyond the k best experts, per token.", ".1%"),
    "margin": Measure("margin", "Best minus second-best score, mean over tokens.", overall=fmean),
    "spread": Measure(
        "spread",
        "Best minus worst score, mean over tokens; near 0 the score cannot tell experts apart.",
        overall=fmean,
    ),
    "near_zero_rate": Measure(
        "near-zero picks", f"Chosen experts whose mixing weight is below {measures.NEAR_ZERO_WEIGHT}.", ".1%"
    ),
    "drop_rate": Measure("dropped", "Wanted pairs of token and expert that found the expert full.", ".1%"),
    "unserved_rate": Measure("unserved", "Tokens that no expert saw.", ".1%"),
    "fluctuation": Measure(
        "fluctuation", "Probe tokens whose set of experts changed since the previous recording.", ".1%"
    ),
    "class_information": Measure("class bits", "Mutual information between expert and class, in bits.", ".2f"),
    "subspace_overlap": Measure(
        "overlap",
        "Mean squared cosine of the principal angles between experts' routing subspaces; random: r / D.",
        overall=fmean,
    ),
    "orthonormality_error": Measure("‖UᵀU−I‖", "Spectral orthonormality error of the worst basis.", ".0e"),
}
_EVALUATED = ("load_cv2", "weight_cv2", "fallback_rate", "near_zero_rate", "drop_rate")


def routing_figures(tally: Tally) -> dict[str, float]:
    """The measures of what a layer did with its tokens."""
    totals = tally.totals.cpu()
    num_pairs = totals.count_E.sum()
    figures = {
        "tokens": totals.num_tokens,
        "load_cv2": measures.load_cv2(totals.count_E),
        "weight_cv2": measures.load_cv2(totals.weight_E),
        "max_load": measures.max_load(totals.count_E),
        "fallback_rate": totals.num_fell_back.double() / totals.num_judged,
        "tail_mass": totals.tail_sum_E[(tally.top_k or 1) - 1] / totals.num_above,
        "margin": totals.margin_sum / totals.num_scored,
        "spread": totals.spread_sum / totals.num_scored,
        "near_zero_rate": totals.num_near_zero.double() / num_pairs,
        "drop_rate": measures.drop_rate(totals.num_dropped, num_pairs),
        "unserved_rate": totals.num_unserved.double() / totals.num_tokens,
        "class_information": measures.class_information(totals.count_CE[:-1]),
    }
    return {name: float(value) for name, value in figures.items()}


def geometry_figures(layer: MixtureLayer) -> dict[str, float]:
    """The measures of a layer's bases, as they are now; NaN for a layer without any."""
    basis_EDr = routing_basis(layer)
    return {
        "subspace_overlap": math.nan if basis_EDr is None else float(measures.subspace_overlap(basis_EDr)),
        "orthonormality_error": max(basis_errors(layer).values(), default=math.nan),
    }


def basis_errors(layer: nn.Module) -> dict[str, float]:
    """The spectral orthonormality error of every stack of bases of a layer, by its name: that of the worst expert."""
    named = {id(parameter): name for name, parameter in layer.named_parameters()}
    return {
        named[id(basis)].removeprefix("experts."): float(orthonormality_error(_on_cpu(basis)).max())
        for basis in bases(layer)
    }


def routing_basis(layer: MixtureLayer) -> Tensor | None:
    """The columns (E, D, r) by which a layer routes, or None if it does not route by a basis."""
    score = layer.score
    if score is None or not score.needs_basis:
        return None
    basis = score.basis if score.basis is not None else layer.experts.token_basis
    assert basis is not None
    return _on_cpu(basis)[:, :, : score.route_rank]


def _on_cpu(basis: Tensor) -> Tensor:
    """Because not every accelerator knows float64; all experts, where FSDP has shared them out."""
    return whole(basis).detach().cpu()


def markdown(summary: Summary) -> str:
    """One row per layer, padded so that it also reads well unrendered; measures that mean nothing here are left out.

    >>> print(markdown({"blocks.1.mlp": {"load_cv2": 0.25, "fallback_rate": 0.031, "margin": math.nan}}))
    | layer        | load CV² | fallback |
    | :----------- | -------: | -------: |
    | blocks.1.mlp |   0.2500 |     3.1% |
    """
    shown = columns(summary)
    rows = [["layer", *(MEASURES[name].label for name in shown)]]
    rows += [[layer, *(MEASURES[name].text(figures[name]) for name in shown)] for layer, figures in summary.items()]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    ruler = [":" + "-" * (widths[0] - 1), *("-" * (width - 1) + ":" for width in widths[1:])]
    lines = [
        [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        for row in rows
    ]
    return "\n".join("| " + " | ".join(line) + " |" for line in [lines[0], ruler, *lines[1:]])


def columns(summary: Summary) -> list[str]:
    """The measures that have a meaning in at least one layer, in the order of `MEASURES`."""
    return [name for name in MEASURES if any(not math.isnan(f.get(name, math.nan)) for f in summary.values())]


def over_layers(layers: Summary, measures: Iterable[str] = _EVALUATED) -> dict[str, float]:
    """One figure for all layers of a model; what has no meaning for its routers is left out."""
    figures = {}
    for name in measures:
        values = [layer[name] for layer in layers.values() if not math.isnan(layer[name])]
        if values:
            figures[name] = float(MEASURES[name].overall(values))
    return figures
