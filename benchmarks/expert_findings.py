"""What experts of a cluster-converted DeiT-Ti do with photographs, beside shuffled baselines: docs/gallery.md.

    ermoe upcycle deit_tiny_patch16_224 IMAGES --weights FILE --init clusters --images 400 --out deit
    python benchmarks/expert_findings.py deit IMAGES

One pass over the test images (ImageNet's 1,000 classes in their order, one image each). For groups of classes: the
share of an image's choices that fall on an expert, in the group and outside of it, and in as many images drawn at
random, 1,000 times. For looks: the mean of an expert's patches in standard deviations of all patches, and of patches
dealt out at random. Adds a line to benchmarks/results/bench.jsonl.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import ermoe
from ermoe.explorer.cards import Cards
from ermoe.explorer.patches import patch_grid
from ermoe.images.run import transform_for
from ermoe.studies.bench.result import Result, save, show

GROUPS = {"animals": range(398), "food": range(923, 970)}
FINDINGS = [("blocks.5.mlp", 2, "animals"), ("blocks.7.mlp", 6, "food"), ("blocks.11.mlp", 2, "animals")]
LOOKS = [("blocks.5.mlp", 7)]
BATCH, DRAWS = 8, 1000


def counted(model: torch.nn.Module, data: str) -> Cards:
    """Cards of all test images."""
    images, transform = ermoe.open_images(data, "test"), transform_for(model)
    side = transform.size
    cards = Cards(model, patch_grid(model, torch.empty(1, 3, side, side)), images.classes)
    for start in range(0, len(images), BATCH):
        rows = np.arange(start, min(start + BATCH, len(images)))
        pixels = transform.host(images, rows, 0)
        cards.add(transform.device(pixels, images.label_N[rows], rows, 0), pixels)
    return cards


def of_group(cards: Cards, layer: str, expert: int, group: str, label_N: torch.Tensor) -> dict[str, float]:
    """Mean share of the choices inside and outside of a group of classes, and in groups drawn at random."""
    _, count_NE = cards.counts(layer)
    share_N = count_NE[:, expert] / count_NE.sum(1)
    inside_N = torch.isin(label_N, torch.tensor(GROUPS[group]))
    generator, number = torch.Generator().manual_seed(0), int(inside_N.sum())
    drawn = torch.stack(
        [share_N[torch.randperm(len(share_N), generator=generator)[:number]].mean() for _ in range(DRAWS)]
    )
    name = f"{layer} expert {expert}"
    return {
        f"{name}, {group}": float(share_N[inside_N].mean()),
        f"{name}, others": float(share_N[~inside_N].mean()),
        f"{name}, {group} shuffled": float(drawn.mean()),
        f"{name}, {group} shuffled sd": float(drawn.std()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    cards = counted(ermoe.load(options.model).eval(), options.data)
    label_N = ermoe.open_images(options.data, "test").label_N
    result = Result("expert_findings", {"images": cards.num_images}, reference="shuffled")
    for layer, expert, group in FINDINGS:
        result.figures |= of_group(cards, layer, expert, group, label_N)
    for layer, expert in LOOKS:
        card = cards.card(layer, expert)
        for name, (own, shuffled) in card.looks.items():
            result.figures |= {f"{layer} expert {expert}, {name}": own}
            result.figures |= {f"{layer} expert {expert}, {name} shuffled": shuffled}
        own, shuffled = card.place_bits
        result.figures |= {f"{layer} expert {expert}, bits of place": own}
        result.figures |= {f"{layer} expert {expert}, bits of place shuffled": shuffled}
    console = Console()
    show(result, console)
    console.print(f"written: {save(result, options.out)}")


if __name__ == "__main__":
    main()
