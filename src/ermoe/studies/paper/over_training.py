"""Where tokens go while a pretrained model is fine-tuned (scale tiny): by class (Fig. 3), and for how long.

"Stable routing" is in the paper's title and in none of its tables. `stability` measures it: between steps of training,
between seeds, and between an image and a slightly changed one.

Letters: N images of S tokens, T = N·S tokens, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.analysis import plots
from ermoe.analysis.choices import Choices, class_bits, record_choices
from ermoe.analysis.plots import ACCENT, Curve, Scale, curves
from ermoe.analysis.recorder import record_routing
from ermoe.explorer.inspection import short
from ermoe.images.run import LabelledImages, as_model, transform_for
from ermoe.studies.figures import Runs, mean
from ermoe.studies.paper import images
from ermoe.studies.paper.finetuning import no_limit
from ermoe.studies.paper.images import LABELS, OFFSETS, PAPER_RULE, Variant
from ermoe.studies.paper.setup import Setup
from ermoe.studies.paper.study import Findings, every, study
from ermoe.studies.paper.usage import maps
from ermoe.train.loop import settle_on
from ermoe.train.run_folder import RunFolder

_SHOWN_CLASSES = 20
_FOLLOWED = {method: LABELS[method] for method in (PAPER_RULE, "ermoe-clusters")}


def over_training(setup: Setup, method: str, seed: int, data: LabelledImages) -> Iterator[tuple[int, nn.Module]]:
    """The model of a method before training, offsets settled, and after every quarter of it, each with its step."""
    variant = Variant(method, method)
    result = images.trained(setup, variant, seed, data)
    device = next(result.model.parameters()).device
    first = images.started(setup, variant, seed, data).to(device).eval()
    settle_on(first, transform_for(first).of(data.train), device)
    yield 0, first
    steps = images.base_recipe(setup, method).epoch_steps
    for place in sorted(RunFolder(result.folder).kept(0).parent.glob("epoch-*")):
        yield steps * int(place.name.removeprefix("epoch-")), images.loaded(place, variant, device)


@torch.no_grad()
def _by_step(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """By step and layer: bits about the class given the position, those of shuffled labels, fallback, and weights."""
    data = images.source(setup)
    label_N = data.test.label_N
    found: dict[str, Any] = {}
    for step, model in over_training(setup, method, seed, data):
        with record_routing(model, classes=data.classes) as recorder, record_choices(model) as choices:
            for batch in images.loader_of(model, data):
                recorder.labels(batch.label)
                model(as_model(model, batch.image))
        summary, generator = recorder.summary(), torch.Generator().manual_seed(0)
        found[str(step)] = {}
        for layer, tally in recorder.tallies.items():
            bits, shuffled = class_bits(choices[layer].of_images(len(label_N)), label_N, generator)
            own = {"bits": bits, "shuffled": shuffled, "fallback": summary[layer]["fallback_rate"]}
            if seed == 1:  # which is drawn
                shares_CE = plots.class_shares(tally.totals.weight_CE[:-1].cpu().numpy())
                own["weight"] = shares_CE[:_SHOWN_CLASSES].round(4).tolist()
            found[str(step)][short(layer)] = own
    return {"steps": found, "classes": data.test.classes[:_SHOWN_CLASSES]}


@study(
    "mean mixing weight of every class and expert over training",
    "four layers of ViT-B/16 during 300 epochs of ImageNet; heat maps, no numbers.",
    images.describe,
    every(_FOLLOWED, _by_step),
)
def train_heatmaps(runs: Runs) -> Findings:
    """Bits that experts tell about the class beyond the position and beyond chance, by step and layer."""
    first_seed = {record["name"]: record["figures"] for record in reversed(runs.records)}
    rows: list[list[str]] = []
    sentences = ["Paper: preferences sharpen with training and with depth."]
    layers: list[str] = []
    for method, label in _FOLLOWED.items():
        if method not in first_seed:
            continue
        figures = first_seed[method]
        steps = list(figures["steps"])
        layers = list(figures["steps"][steps[0]])
        for step in steps:
            row = [label, step, *(f"{_beyond_chance(runs, method, step, layer):.3f}" for layer in layers)]
            fallback = [runs.mean(method, "steps", step, layer, "fallback") for layer in layers]
            rows.append([*row, f"{mean(fallback):.1%}"])
        start, end = (
            mean([_beyond_chance(runs, method, step, layer) for layer in layers]) for step in (steps[0], steps[-1])
        )
        early, late = (_beyond_chance(runs, method, steps[-1], layer) for layer in (layers[0], layers[-1]))
        sentences.append(
            f"{label}: {start:.3f} bits at the start and {end:.3f} at the end, in the mean over layers; then "
            f"{early:.3f} in the first layer and {late:.3f} in the last."
        )
    header = ["method", "step", *(f"class bits, {layer}" for layer in layers), "fallback"]
    drawn = first_seed[PAPER_RULE]
    first, *_, last = drawn["steps"]
    chosen = {step: drawn["steps"][step] for step in (first, last)}
    return Findings(header, rows, sentences, maps(chosen, drawn["classes"], of="step"))


def _beyond_chance(runs: Runs, method: str, step: str, layer: str) -> float:
    return runs.mean(method, "steps", step, layer, "bits") - runs.mean(method, "steps", step, layer, "shuffled")


_WATCHED = 512
_COLOURS = {
    "v-moe": "#8b5fbf",
    "emoe": "#65a30d",
    PAPER_RULE: ACCENT,
    OFFSETS: "#d97706",
    "ermoe-shared": "#be185d",
    "ermoe-clusters": "#7c2d12",
}


def _shifted(image_BCSS: Tensor) -> Tensor:
    return F.pad(image_BCSS, (2, 0, 0, 0), mode="replicate")[..., :-2]


def _noisy(image_BCSS: Tensor) -> Tensor:
    return image_BCSS + 0.1 * torch.randn(image_BCSS.shape, generator=torch.Generator().manual_seed(0)).to(image_BCSS)


PERTURBATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "shift": _shifted,
    "noise": _noisy,
    "brightness": lambda image_BCSS: image_BCSS + 0.1,
}
"""Two pixels to the right; noise, and light, of a tenth of the pixels' deviation."""


def _steadiness(setup: Setup, method: str, seed: int) -> dict[str, Any]:
    """How many tokens change their expert: from one quarter of training to the next, between seeds, and perturbed."""
    data = images.source(setup)
    few = LabelledImages(data.path, data.train, images.drawn(data.test, _WATCHED))
    found: dict[str, Any] = {"steps": {}, "perturbed": {}, "seeds": {}}
    before, last = None, None
    for step, model in over_training(setup, method, seed, data):
        last, now = model, _choices(model, few)
        if before is not None:
            found["steps"][str(step)] = _changes(before, now)
        before = now
    assert last is not None
    assert before is not None
    for name, perturb in PERTURBATIONS.items():
        found["perturbed"][name] = _changes(before, _choices(last, few, perturb))
    for earlier in (other for other in setup.seeds if other < seed):
        other = images.trained(setup, Variant(method, method), earlier, data).model
        found["seeds"][str(earlier)] = _apart(before, _choices(other, few), len(few.test))
    return found


@torch.no_grad()
def _choices(
    model: nn.Module, data: LabelledImages, perturb: Callable[[Tensor], Tensor] = lambda image_BCSS: image_BCSS
) -> dict[str, Choices]:
    """The experts of some test images; V-MoE's without a limit, which is what it chooses and not what it drops."""
    with no_limit(model), record_choices(model) as choices:
        for batch in images.loader_of(model, data):
            model(as_model(model, perturb(batch.image)))
    return choices


def _changes(before: dict[str, Choices], after: dict[str, Choices]) -> dict[str, float]:
    """In the mean over layers: tokens with another first expert, and what two sets of experts have in common.

    Where one expert has nearly all tokens, few can change theirs. So beside it stands the ``chance`` that two tokens,
    one from before and one from after, have different experts.
    """
    pairs = [(before[layer], after[layer]) for layer in before]
    return {
        "changed": mean([float((old.top_T != new.top_T).float().mean()) for old, new in pairs]),
        "jaccard": mean([_jaccard(*pair) for pair in pairs]),
        "chance": mean([_chance(old.top_T, new.top_T) for old, new in pairs]),
    }


def _chance(old_T: Tensor, new_T: Tensor) -> float:
    number = int(max(old_T.max(), new_T.max())) + 1
    old_E, new_E = (torch.bincount(own_T.long(), minlength=number).double() / len(own_T) for own_T in (old_T, new_T))
    return 1 - float(old_E @ new_E)


def _jaccard(before: Choices, after: Choices) -> float:
    both_T = (before.used_TE & after.used_TE).sum(1)
    either_T = (before.used_TE | after.used_TE).sum(1)
    return float(torch.where(either_T > 0, both_T / either_T.clamp_min(1), 1).mean())


def _apart(ours: dict[str, Choices], theirs: dict[str, Choices], num_images: int) -> dict[str, float]:
    """Tokens with another first expert under the best matching of the experts, and so with experts of other images."""
    generator = torch.Generator().manual_seed(0)
    other_N = torch.randperm(num_images, generator=generator)
    changed, chance = [], []
    for layer in ours.keys() & theirs.keys():
        our_NS, their_NS = ours[layer].of_images(num_images), theirs[layer].of_images(num_images)
        changed.append(unmatched(our_NS.flatten(), their_NS.flatten()))
        chance.append(unmatched(our_NS.flatten(), their_NS[other_N].flatten()))
    return {"changed": mean(changed), "chance": mean(chance)}


def unmatched(our_T: Tensor, their_T: Tensor) -> float:
    """Share of tokens whose experts are not each other's, experts being matched as well as can be (Hungarian).

    >>> unmatched(torch.tensor([0, 0, 1, 1]), torch.tensor([1, 1, 0, 1]))
    0.25
    """
    from scipy.optimize import linear_sum_assignment

    number = int(max(our_T.max(), their_T.max())) + 1
    together_EE = torch.bincount(our_T.long() * number + their_T.long(), minlength=number**2).view(number, number)
    row, column = linear_sum_assignment(-together_EE.numpy())
    return 1 - float(together_EE.numpy()[np.asarray(row), np.asarray(column)].sum()) / len(our_T)


@study(
    "tokens that change their expert: in training, between seeds, and in slightly changed images",
    "stable routing is in the title; there is no figure of it.",
    images.describe,
    every(_COLOURS, _steadiness),
)
def stability(runs: Runs) -> Findings:
    """A row for each method: tokens with another first expert, and in brackets what sets of experts share."""
    there = [method for method in _COLOURS if runs.of(method, "steps")]
    steps = list(runs.of(there[0], "steps")[0])  # type: ignore[call-overload]
    header = [
        "method",
        *(f"by step {step}" for step in steps),
        *PERTURBATIONS,
        "kept beyond chance, shift",
        "another seed",
        "another seed and image",
    ]
    rows, lines = [], {}
    for method in there:
        places = [*(("steps", step) for step in steps), *(("perturbed", name) for name in PERTURBATIONS)]
        row = [_change_cell(runs, method, *place) for place in places]
        row.append(f"{_kept(runs, method):.1%}")
        pairs = runs.of(method, "seeds")
        seeds = [[pair[key] for own in pairs for pair in own.values()] for key in ("changed", "chance")]  # type: ignore[attr-defined]
        rows.append([LABELS[method], *row, *(f"{mean(own):.1%}" if own else "–" for own in seeds)])
        moved = [runs.mean(method, "steps", step, "changed") for step in steps]
        lines[LABELS[method]] = Curve([int(step) for step in steps], moved, marked=True)
    scale = Scale("step of training", "tokens with another first expert", percent=True)
    kept = ", ".join(f"{LABELS[method]} {_kept(runs, method):.1%}" for method in there)
    sentences = [
        "Uneven loads look steady: an expert with all tokens keeps them. Of what chance would change under a shift by "
        f"two pixels, methods keep: {kept}.",
        *(
            runs.verdict(
                (method, LABELS[method]), ("v-moe", "V-MoE"), "perturbed", "shift", "changed", what="shift", form=".1%"
            )
            for method in there
            if method != "v-moe" and "v-moe" in there
        ),
    ]
    return Findings(header, rows, sentences, curves(lines, [_COLOURS[method] for method in there], scale))


def _kept(runs: Runs, method: str) -> float:
    """Cohen's κ of the first experts of images and of shifted ones."""
    shift = (method, "perturbed", "shift")
    return 1 - runs.mean(*shift, "changed") / runs.mean(*shift, "chance")


def _change_cell(runs: Runs, method: str, *place: str) -> str:
    return f"{runs.mean(method, *place, 'changed'):.1%} ({runs.mean(method, *place, 'jaccard'):.2f})"
