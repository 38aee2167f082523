"""What experts of a cluster-converted DeiT-Ti do with photographs, beside chance: docs/results/deit-experts.md.

    ermoe upcycle deit_tiny_patch16_224 --data IMAGES --weights FILE --init clusters --images 400 --out deit
    python benchmarks/expert_findings.py deit IMAGES

Each question, a group of classes or a look, is put to all experts on the photographs of the train split, and the expert
with the strongest answer is chosen. Its figures come from the test split, which had no part in the conversion or in the
choice (ImageNet's 1,000 classes in their order, one photograph each, in both). All questions are recorded, whatever
comes out. For a group: the share of a photograph's choices that fall on the expert, in the group and outside of it, and
in as many photographs drawn at random, 1,000 times. For a look: the mean of the expert's patches in standard deviations
of all patches, and of patches dealt out at random among the same eight photographs. Adds to
benchmarks/results/expert_findings.jsonl.

Letters: N photographs, G of them in a group, E experts, K draws.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

import ermoe
from ermoe.explorer.cards import ATTRIBUTES, Cards
from ermoe.explorer.inspection import short
from ermoe.explorer.patches import patch_grid
from ermoe.images.run import transform_for
from ermoe.studies.record import Record, add_records, new_record
from ermoe.studies.tables import Table

STUDY = "expert_findings"
GROUPS: dict[str, Sequence[int]] = {
    "animals": range(398),
    "birds": [*range(7, 25), *range(80, 101), *range(127, 147)],
    "dogs": range(151, 269),
    "insects": range(300, 327),
    "food": range(923, 970),
    "landscapes": [970, *range(972, 981)],
}
BATCH, DRAWS = 8, 1000


def counted(model: torch.nn.Module, data: str, split: Literal["train", "test"]) -> tuple[Cards, Tensor]:
    """Cards of all photographs of a split, and the classes of these."""
    images, transform = ermoe.open_images(data, split), transform_for(model)
    side = transform.size
    cards = Cards(model, patch_grid(model, torch.empty(1, 3, side, side)), images.classes)
    for start in range(0, len(images), BATCH):
        rows = np.arange(start, min(start + BATCH, len(images)))
        pixels = transform.host(images, rows, 0)
        cards.add(transform.device(pixels, images.label_N[rows], rows, 0), pixels)
    return cards, images.label_N


def of_group(cards: Cards, label_N: Tensor, group: str) -> dict[tuple[str, int], dict[str, float]]:
    """By expert its mean share of the choices inside and outside of a group, and in groups drawn at random."""
    inside_N = torch.isin(label_N, torch.tensor(list(GROUPS[group])))
    generator = torch.Generator().manual_seed(0)
    draw_KG = torch.rand(DRAWS, len(label_N), generator=generator).argsort(1)[:, : int(inside_N.sum())]
    found = {}
    for layer in cards.layers:
        _, count_NE = cards.counts(layer)
        share_NE = count_NE / count_NE.sum(1, keepdim=True)
        drawn_KE = torch.stack([share_NE[draw_G].mean(0) for draw_G in draw_KG])
        rows = {
            "own": share_NE[inside_N].mean(0),
            "others": share_NE[~inside_N].mean(0),
            "shuffled": drawn_KE.mean(0),
            "shuffled_sd": drawn_KE.std(0),
        }
        for expert in range(share_NE.shape[1]):
            found[layer, expert] = {name: float(row_E[expert]) for name, row_E in rows.items()}
    return found


def of_looks(cards: Cards) -> dict[tuple[str, int], dict[str, list[float]]]:
    """By expert how its patches look and what they tell about the place: itself, and shuffled."""
    return {
        (card.layer, card.expert): {name: list(pair) for name, pair in {**card.looks, "place": card.place_bits}.items()}
        for card in cards.all_cards()
    }


def findings(model: torch.nn.Module, data: str) -> list[Record]:
    """A record of every question: the expert that the train split chose, and its figures on both splits."""
    (seen, seen_label_N), (held, held_label_N) = (counted(model, data, split) for split in ("train", "test"))
    answers: list[tuple[str, tuple[str, int], Any, Any]] = []
    for group in GROUPS:
        before, after = of_group(seen, seen_label_N, group), of_group(held, held_label_N, group)
        expert = max(before, key=lambda e: (before[e]["own"] - before[e]["shuffled"]) / before[e]["shuffled_sd"])
        answers.append((group, expert, before[expert], after[expert]))
    looks_before, looks_after = of_looks(seen), of_looks(held)
    for look in ATTRIBUTES:
        expert = max(looks_before, key=lambda e: abs(looks_before[e][look][0] - looks_before[e][look][1]))
        answers.append((look, expert, looks_before[expert], looks_after[expert]))
    settings = {"chosen_on": seen.num_images, "measured_on": held.num_images, "draws": DRAWS}
    return [
        new_record(
            STUDY,
            question,
            settings=settings,
            figures={"layer": layer, "expert": expert, "chosen": before, "measured": after},
        )
        for question, (layer, expert), before, after in answers
    ]


def _figures(records: Sequence[Record], question: str) -> dict[str, Any]:
    """Of the last run of a question."""
    return dict([record for record in records if record["name"] == question][-1]["figures"])


def _name(figures: dict[str, Any]) -> str:
    return f"{short(figures['layer'])}, expert {figures['expert']}"


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−")


def groups_table(records: Sequence[Record]) -> Table:
    """Every group, with the expert that the train split chose for it and what that does with other photographs."""
    rows = []
    for group in GROUPS:
        figures = _figures(records, group)
        own = figures["measured"]
        distance = (own["own"] - own["shuffled"]) / own["shuffled_sd"]
        share = [f"{100 * value:.1f} %" for value in (figures["chosen"]["own"], own["own"], own["others"])]
        chance = f"{100 * own['shuffled']:.1f} ± {100 * own['shuffled_sd']:.1f} %"
        rows.append([group, _name(figures), *share, chance, f"{distance:.1f}"])
    held = ["held out: there", "everywhere else", "as many at random", "distance in sd"]
    return Table(["group", "chosen", "where it was chosen", *held], rows)


def looks_table(records: Sequence[Record]) -> Table:
    """Every look, with the expert that the train split chose for it and what its patches are like elsewhere."""
    rows = []
    for look in ATTRIBUTES:
        figures = _figures(records, look)
        (own, shuffled), (before, _) = figures["measured"][look], figures["chosen"][look]
        rows.append([look, _name(figures), *map(_signed, (before, own, shuffled))])
    return Table(["look", "chosen", "where it was chosen", "held out", "shuffled"], rows)


def expert_table(records: Sequence[Record], question: str) -> Table:
    """All looks of the expert that was chosen for one, on photographs held out."""
    measured = _figures(records, question)["measured"]
    rows = [[name, _signed(own), _signed(shuffled)] for name, (own, shuffled) in measured.items() if name != "place"]
    own, shuffled = measured["place"]
    rows.append(["bits about the place", f"{own:.2f}", f"{shuffled:.2f}"])
    return Table(["its patches, in standard deviations of all patches", "it", "shuffled"], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    records = add_records(options.out / f"{STUDY}.jsonl", *findings(ermoe.load(options.model).eval(), options.data))
    for table in (groups_table(records), looks_table(records)):
        print(table.markdown(), end="\n\n")


if __name__ == "__main__":
    main()
