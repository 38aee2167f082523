"""What the demonstration shows: a table, a page, and the picture of the README."""

from __future__ import annotations

import math
from collections.abc import Iterator
from os import PathLike
from pathlib import Path

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from PIL import Image
from torch import Tensor

from ermoe.analysis import plots
from ermoe.analysis.page import Markup, Page, figure, grid, legend, svg, table, tiles
from ermoe.analysis.patches import patch_experts, tinted
from ermoe.analysis.recorder import RoutingRecorder
from ermoe.analysis.report import class_panel, measure_table, score_panel
from ermoe.analysis.summary import MEASURES
from ermoe.data.digits import NUM_CLASSES, digits
from ermoe.files import replacing
from ermoe.images.demo import GRID, NUM_EXPERTS, Budget, Result, standardised

HEADER = ["model", "accuracy", "load CV²", "fallback", "parameters", "active", "step time"]
COLOURS = {"learned gate": "#d97706", "V-MoE": "#8b5fbf", "ERMoE": plots.ACCENT}
_STROKE = 0.75  # how dark the ink of a digit is drawn


def rows(results: list[Result]) -> list[list[str]]:
    """The table: held-out accuracy, measures as means over the MoE layers, size, and time beside the dense model."""
    dense = results[0]
    return [
        [
            result.name,
            f"{result.accuracy:.1%}",
            MEASURES["load_cv2"].text(result.mean("load_cv2")),
            MEASURES["fallback_rate"].text(result.mean("fallback_rate")),
            f"{result.parameters / 1e3:,.0f} k",
            f"{result.active_parameters / 1e3:,.0f} k",
            f"{result.step_seconds / dense.step_seconds:.2f} ×",
        ]
        for result in results
    ]


def noise_note(results: list[Result]) -> str:
    """How large a difference in accuracy has to be before it means something."""
    num_test = len(digits()[1])
    error = math.sqrt(results[0].accuracy * (1 - results[0].accuracy) / num_test)
    return (
        f"With {num_test} held-out digits and one seed, accuracies less than about {300 * error:.1f} points apart are "
        "equal."
    )


def demo_page(results: list[Result], budget: Budget) -> Page:
    """The report of a demonstration."""
    train, test = digits()
    routed = {result.name: result for result in results if result.routing is not None}
    page = Page(
        "ERMoE on handwritten digits",
        "One small vision transformer, dense, and with the feed-forward networks of blocks 1 and 3 replaced by eight "
        "experts, of which each token meets two. All versions had the same start, batches and number of steps; "
        "ERMoE has the library's options for training from scratch, and its bases learn at a quarter of the rate, both "
        "chosen after a look at these held-out digits.",
        facts={
            "training digits": f"{len(train):,}",
            "held-out digits": f"{len(test):,}",
            "steps": f"{budget.steps(len(train)):,}",
            "seed": str(budget.seed),
        },
    )
    page.section(
        "What they reached",
        f"Measured on held-out digits; routing measures are means over both layers. {noise_note(results)}",
        [table(HEADER, rows(results), strong="ERMoE")],
    )
    page.section(
        "How evenly the experts work",
        "Experts sorted by usage. A flat line at 1 means that all have equal work. V-MoE balances with two auxiliary "
        "losses, ERMoE with offsets that follow the load, without any loss.",
        [grid(_load_panels(routed))],
    )
    page.section(
        "Where the patches go",
        "Held-out digits, each patch in the colour of the expert with the largest say in it. Colours mean nothing "
        "across models or layers.",
        [
            _expert_legend(),
            grid((panel for name in ("ERMoE", "learned gate") for panel in _patch_panels(routed[name])), pairs=True),
        ],
    )
    page.section(
        "Which digits use which experts",
        "Of all choices made by the tokens of a digit (row), the percentage that fell on each expert (column).",
        [grid((panel for name in ("ERMoE", "learned gate") for panel in _class_panels(routed[name])), pairs=True)],
    )
    _add_inside(page, _recording(routed["ERMoE"]))
    return page


def _add_inside(page: Page, routing: RoutingRecorder) -> None:
    summary = routing.summary()
    page.section(
        "How ERMoE decides",
        "The score of a token and an expert is the cosine between the token and its attention context, seen in the "
        "expert's own basis. A token whose best score is below T fell back: no expert really fits it.",
        [grid(score_panel(name, tally, summary[name]) for name, tally in routing.tallies.items())],
    )
    page.section("All measures of ERMoE", "Defined in docs/measures.md.", [measure_table(summary)])


def _recording(result: Result) -> RoutingRecorder:
    assert result.routing is not None, f"{result.name} has no MoE layers"
    return result.routing


def _loads(routed: dict[str, Result], layer: str) -> dict[str, Tensor]:
    return {name: _recording(result).tallies[layer].totals.count_E for name, result in routed.items()}


def _load_panels(routed: dict[str, Result]) -> Iterator[Markup]:
    colours = [COLOURS[name] for name in routed]
    for layer in _recording(routed["ERMoE"]).tallies:
        cv2 = {name: _recording(result).summary()[layer]["load_cv2"] for name, result in routed.items()}
        caption = (
            "Load CV²: " + ", ".join(f"{name} {MEASURES['load_cv2'].text(value)}" for name, value in cv2.items()) + "."
        )
        drawing = plots.load_curves(_loads(routed, layer), colours)
        yield figure(svg(drawing, f"expert loads in {layer}"), f"{layer}.", caption)


def _expert_legend() -> Markup:
    return legend((f"expert {e}", colour) for e, colour in enumerate(plots.expert_washes(NUM_EXPERTS)))


def _patch_panels(result: Result) -> Iterator[Markup]:
    for layer, pictures in coloured_digits(result).items():
        described = [(picture, f"digit {digit}, patches coloured by expert") for digit, picture in enumerate(pictures)]
        yield figure(tiles(described), f"{result.name}, {layer}.")


def _class_panels(result: Result) -> Iterator[Markup]:
    routing = _recording(result)
    summary = routing.summary()
    for layer, tally in routing.tallies.items():
        yield class_panel(f"{result.name}, {layer}", tally, routing.class_names, summary[layer])


def coloured_digits(result: Result) -> dict[str, list[Image.Image]]:
    """By layer, one held-out example of each digit, its patches coloured by expert."""
    _, test = digits()
    first = torch.stack([test.image[test.label == digit][0] for digit in range(NUM_CLASSES)])
    washes = plots.expert_washes(NUM_EXPERTS)
    brightness = (1 - _STROKE * first.squeeze(1)).numpy()
    return {
        layer: [tinted(image, grid_hw, washes) for image, grid_hw in zip(brightness, expert.numpy(), strict=True)]
        for layer, expert in patch_experts(result.model, standardised(first), GRID).items()
    }


def write_picture(results: list[Result], path: str | PathLike[str]) -> Path:
    """The picture of the README: digits coloured by the experts of ERMoE's last layer, beside all load curves."""
    routed = {result.name: result for result in results if result.routing is not None}
    layer, pictures = list(coloured_digits(routed["ERMoE"]).items())[-1]
    with plots.style():
        drawing = Figure(figsize=(10, 3.25), layout="constrained", dpi=150)
        left, right = drawing.subfigures(1, 2, squeeze=False, width_ratios=(1.5, 1), wspace=0.05)[0]
        left.suptitle("Patches go to the experts whose basis they fit", x=0.01, ha="left", fontsize=12)
        for axes, picture in zip(left.subplots(2, 5).flat, pictures, strict=True):
            axes.imshow(picture, interpolation="none")
            axes.set_axis_off()
        swatches = [Patch(color=wash, label=str(e)) for e, wash in enumerate(plots.expert_washes(NUM_EXPERTS))]
        named = [Patch(alpha=0, label="expert"), *swatches]
        left.legend(handles=named, loc="outside lower left", ncols=len(named), handlelength=1, columnspacing=1.4)
        right.suptitle("Every expert gets equal work", x=0.01, ha="left", fontsize=12)
        plots.draw_load_curves(right.subplots(), _loads(routed, layer), [COLOURS[name] for name in routed])
        with replacing(path) as draft:
            drawing.savefig(draft, format="png", metadata={"Software": None})
    return Path(path)
