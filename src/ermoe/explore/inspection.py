"""What `ermoe inspect` finds out about one model, and the plots that show it.

Letters: E experts, C classes, B bins, D model width, r routing rank.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ermoe.analysis import measures, plots
from ermoe.analysis.curve_plots import Curve, Scale, curves, score_ridges
from ermoe.analysis.recorder import RoutingRecorder
from ermoe.analysis.report import strongest_pairs
from ermoe.analysis.summary import MEASURES, Summary, basis_errors, routing_basis
from ermoe.analysis.tally import NUM_BINS, Tally
from ermoe.explore.basis_plots import orthonormality_bars, overlap_maps
from ermoe.explore.gallery import Plot
from ermoe.explore.patch_viewer import Patched

THRESHOLDS = [round(0.02 * step, 2) for step in range(50)]
_EPOCH_MEASURES = {"fluctuation": "routing fluctuation", "fallback_rate": "fallback", "top1": "accuracy"}


@dataclass(frozen=True, slots=True)
class AtK:
    """A model with another number of experts a token: accuracy, half its 95 % interval, and how often it agrees."""

    top_k: int
    accuracy: float
    half_width: float
    agreement: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """Everything about one model.

    ``figures`` holds loss and accuracies, if the classes are those the model knows; ``by_k`` is empty where the routers
    have no number of experts a token; ``epochs`` holds a run's evaluations, one a row, empty if it kept none.
    """

    recorder: RoutingRecorder
    patched: Patched
    figures: dict[str, float] = field(default_factory=dict)
    by_k: Sequence[AtK] = ()
    epochs: Sequence[dict[str, float]] = ()

    def tallies(self) -> dict[str, Tally]:
        """Totals by layer, by the names that plots use."""
        return {short(name): tally for name, tally in self.recorder.tallies.items()}

    def summary(self) -> Summary:
        """Measures by layer, by the same names."""
        return {short(name): figures for name, figures in self.recorder.summary().items()}

    def bases(self) -> dict[str, torch.Tensor]:
        """The columns (E, D, r) by which layers route, where they route by columns."""
        found = {short(name): routing_basis(layer) for name, layer in self.recorder.layers.items()}
        return {name: basis for name, basis in found.items() if basis is not None}


def short(layer: str) -> str:
    """A layer's name without what all of them share.

    >>> short("blocks.3.mlp")
    'block 3'
    """
    return re.sub(r"^(?:.*\.)?(?:blocks|layers?)\.(\d+)(?:\..*)?$", r"block \1", layer) or "layer"


def load_plots(found: Inspection, prefix: str) -> list[Plot]:
    """Load curves of all layers, by number of choices and by mixing weight."""
    tallies = found.tallies()
    kinds = {
        "choices": ("By choices.", "How many tokens chose each expert.", "load_cv2"),
        "weight": ("By mixing weight.", "How much say each expert had; idle picks do not count.", "weight_cv2"),
    }
    made = []
    for kind, (title, caption, measure) in kinds.items():
        load = {
            name: (tally.totals.count_E if kind == "choices" else tally.totals.weight_E).cpu()
            for name, tally in tallies.items()
        }
        worst = MEASURES[measure].text(max(figures[measure] for figures in found.summary().values()))
        rows = [(name, e, float(value)) for name, load_E in load.items() for e, value in enumerate(load_E)]
        drawing = plots.load_curves(load, plots.depth_colours(len(load)))
        caption = f"{caption} CV² of the worst layer: {worst}."
        made.append(Plot(f"{prefix}load-{kind}", title, caption, drawing, ["layer", "expert", kind], rows))
    return made


def pooled_plot(models: dict[str, Inspection], colours: Sequence[str]) -> Plot:
    """The paper's picture of balance: all experts of all layers in one line, by their share of the choices."""
    shares = {name: pooled_share(list(found.tallies().values())) for name, found in models.items()}
    lines = {name: Curve(range(1, len(share) + 1), share) for name, share in shares.items()}
    rows = [(name, rank, value) for name, share in shares.items() for rank, value in enumerate(share, 1)]
    drawing = curves(
        lines, colours, Scale("experts of all layers, busiest first", "share of choices", percent=True, whole_x=True)
    )
    caption = "Each expert's share of all choices in the model; a flat line is equal load everywhere."
    return Plot("load-pooled", "All layers together.", caption, drawing, ["model", "rank", "share"], rows)


def pooled_share(tallies: Sequence[Tally]) -> list[float]:
    """Shares of all choices by expert, over all layers, largest first."""
    count = torch.cat([tally.totals.count_E.cpu() for tally in tallies]).double()
    return (count / count.sum().clamp_min(1)).sort(descending=True).values.tolist()


def class_plots(found: Inspection, prefix: str) -> dict[str, Plot]:
    """By layer, the class–expert map with its strongest pairs in words."""
    classes, summary = found.recorder.class_names, found.summary()
    made = {}
    for name, tally in found.tallies().items():
        count_CE = tally.totals.count_CE[:-1].cpu().numpy()
        weight_CE = tally.totals.weight_CE[:-1].cpu().numpy()
        bits = MEASURES["class_information"].text(summary[name]["class_information"])
        rows = [
            (label, e, int(count_CE[c, e]), float(weight_CE[c, e]))
            for c, label in enumerate(classes)
            for e in range(tally.num_experts)
        ]
        made[name] = Plot(
            f"{prefix}classes-{name.replace(' ', '-')}",
            f"{name}.",
            f"The expert tells {bits} bits about the class. {strongest_pairs(count_CE, classes)}",
            plots.class_map(count_CE, classes),
            ["class", "expert", "choices", "weight"],
            rows,
        )
    return made


def score_plot(found: Inspection, prefix: str) -> Plot | None:
    """Histograms of the scores of all layers, with T."""
    scored = {name: tally for name, tally in found.tallies().items() if tally.has_scores()}
    if not scored:
        return None
    histograms = {
        name: (tally.totals.score_B.cpu(), tally.totals.best_score_B.cpu(), tally.threshold)
        for name, tally in scored.items()
    }
    rows = [
        (name, round(-1 + 2 * b / NUM_BINS, 4), int(all_B[b]), int(best_B[b]))
        for name, (all_B, best_B, _) in histograms.items()
        for b in range(NUM_BINS)
    ]
    spread = [found.summary()[name]["spread"] for name in scored]
    caption = f"Spread between experts, best minus worst: {min(spread):.3f} to {max(spread):.3f}, by layer."
    header = ["layer", "bin starts at", "scores", "best scores"]
    return Plot(f"{prefix}scores", "Scores.", caption, score_ridges(histograms), header, rows)


def fallback_plot(found: Inspection, prefix: str) -> Plot | None:
    """The share of tokens that would fall back at every other threshold."""
    judged = {
        name: tally
        for name, tally in found.tallies().items()
        if tally.has_scores() and tally.threshold is not None and bool(tally.totals.num_judged)
    }
    if not judged:
        return None
    rates = {name: [tally.fallback_rate(t) for t in THRESHOLDS] for name, tally in judged.items()}
    lines = {name: Curve(THRESHOLDS, rate) for name, rate in rates.items()}
    now = {f"T = {t:g}": t for t in {tally.threshold for tally in judged.values()} if t is not None}
    scale = Scale("threshold T", "tokens that fall back", percent=True, at=now)
    rows = [(name, t, r) for name, rate in rates.items() for t, r in zip(THRESHOLDS, rate, strict=True)]
    drawing = curves(lines, plots.depth_colours(len(lines)), scale)
    caption = "Tokens whose best score is below T. With a fixed number of experts a token, T changes nothing else."
    return Plot(f"{prefix}fallback", "Fallback against T.", caption, drawing, ["layer", "T", "fallback"], rows)


def tail_plot(found: Inspection, prefix: str) -> Plot | None:
    """The weight above T that every number of experts a token would leave out."""
    tailed = {name: tally for name, tally in found.tallies().items() if bool(tally.totals.num_above)}
    if not tailed:
        return None
    masses = {name: [tally.tail_mass(k) for k in range(1, tally.num_experts + 1)] for name, tally in tailed.items()}
    lines = {name: Curve(range(1, len(mass) + 1), mass, marked=True) for name, mass in masses.items()}
    now = {f"k = {k}": float(k) for k in {tally.top_k for tally in tailed.values()} if k is not None}
    scale = Scale("experts a token, k", "tail mass", percent=True, whole_x=True, at=now)
    rows = [(name, k, m) for name, mass in masses.items() for k, m in enumerate(mass, 1)]
    drawing = curves(lines, plots.depth_colours(len(lines)), scale)
    caption = "Of the score above T, the share that lies beyond the k best experts."
    return Plot(f"{prefix}tail-mass", "Tail mass against k.", caption, drawing, ["layer", "k", "tail mass"], rows)


def accuracy_plot(found: Inspection, prefix: str, num_images: int) -> Plot | None:
    """Accuracy of the same weights with other numbers of experts a token."""
    if not found.by_k:
        return None
    points = sorted(found.by_k, key=lambda at: at.top_k)
    line = Curve(
        [at.top_k for at in points], [at.accuracy for at in points], [at.half_width for at in points], marked=True
    )
    scale = Scale("experts a token, k", "accuracy", percent=True, whole_x=True, from_zero=False)
    rows = [(at.top_k, at.accuracy, at.half_width, at.agreement) for at in points]
    changed = ", ".join(f"{1 - at.agreement:.0%} at k = {at.top_k}" for at in points if at.agreement < 1)
    caption = (
        f"The same weights, {num_images:,} images, 95 % intervals. "
        f"Predictions that change: {changed or 'none'}. Retraining with another k may end elsewhere."
    )
    header = ["k", "accuracy", "half of the 95 % interval", "agreement"]
    drawing = curves({"": line}, [plots.ACCENT], scale)
    return Plot(f"{prefix}accuracy", "Accuracy against k.", caption, drawing, header, rows)


def basis_plots(found: Inspection, prefix: str) -> list[Plot]:
    """Overlap of the routing subspaces, their principal angles, and how orthonormal all bases are."""
    bases = found.bases()
    made = [*_subspace_plots(bases, prefix)] if bases else []
    errors = {
        f"{short(name)} {basis}": error
        for name, layer in found.recorder.layers.items()
        for basis, error in basis_errors(layer).items()
    }
    if errors:
        caption = "Of the worst expert. Rounding alone gives 1e-7 in float32; training adds to it until a retraction."
        drawing = orthonormality_bars(errors)
        header = ["basis", "error"]
        made.append(Plot(f"{prefix}orthonormality", "Orthonormality.", caption, drawing, header, list(errors.items())))
    return made


def _subspace_plots(bases: dict[str, torch.Tensor], prefix: str) -> list[Plot]:
    cosines = {name: measures.principal_cosines(basis) for name, basis in bases.items()}
    overlaps = {name: cosine.square().mean(-1) for name, cosine in cosines.items()}
    dim, route_rank = next(iter(bases.values())).shape[1:]
    rows = [
        (name, i, j, float(overlap[i, j]))
        for name, overlap in overlaps.items()
        for i in range(len(overlap))
        for j in range(i)
    ]
    caption = f"Mean squared cosine of the principal angles; random subspaces of this size have {route_rank / dim:.2f}."
    title = "Overlap of the experts' subspaces."
    made = [Plot(f"{prefix}overlap", title, caption, overlap_maps(overlaps), ["layer", "i", "j", "overlap"], rows)]
    angles = {name: _mean_angles(cosine) for name, cosine in cosines.items()}
    lines = {name: Curve(range(1, len(angle) + 1), angle) for name, angle in angles.items()}
    scale = Scale("principal angle, smallest first", "degrees", whole_x=True)
    made.append(
        Plot(
            f"{prefix}angles",
            "Principal angles.",
            "Mean over all pairs of experts: 0° is a shared direction, 90° an orthogonal one.",
            curves(lines, plots.depth_colours(len(lines)), scale),
            ["layer", "number", "degrees"],
            [(name, n, a) for name, angle in angles.items() for n, a in enumerate(angle, 1)],
        )
    )
    return made


def _mean_angles(cosine_EEr: torch.Tensor) -> list[float]:
    """In degrees, over pairs of different experts."""
    others = ~torch.eye(len(cosine_EEr), dtype=torch.bool)
    return torch.rad2deg(cosine_EEr[others].clamp(-1, 1).acos()).mean(0).tolist()


def epoch_plot(models: dict[str, Inspection], colours: Sequence[str], measure: str) -> Plot | None:
    """A measure over the epochs of the runs that kept it."""
    lines = {}
    for name, found in models.items():
        kept = [(row["epoch"], row[measure]) for row in found.epochs if not math.isnan(row.get(measure, math.nan))]
        if kept:
            lines[name] = Curve([epoch for epoch, _ in kept], [value for _, value in kept], marked=len(kept) <= 30)
    if not lines:
        return None
    shown = [colour for name, colour in zip(models, colours, strict=True) if name in lines]
    label = _EPOCH_MEASURES.get(measure, measure)
    scale = Scale("epoch", label, percent=True, whole_x=True, from_zero=measure != "top1")
    rows = [
        (name, epoch, value)
        for name, line in lines.items()
        for epoch, value in zip(line.x, line.y, strict=True)  # type: ignore[arg-type]
    ]
    caption = "Probe tokens whose set of experts changed since the epoch before." if measure == "fluctuation" else ""
    title = f"{label[0].upper()}{label[1:]} over epochs."
    return Plot(f"epochs-{measure}", title, caption, curves(lines, shown, scale), ["model", "epoch", measure], rows)
