"""Cards of experts that see brains: the cubes they take, and the tissues in these, beside experts dealt out at random.

Letters: x, y, z cubes, S = x·y·z of them, E experts, K shuffles.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ermoe.brain.data.scans import TISSUES
from ermoe.explorer.cards import BestPatch, Card, Neighbours, Words, bits, is_among_best, keep_best, surroundings
from ermoe.explorer.cubes import SHUFFLES, Cubes, grey, layers_of, tissue_sums
from ermoe.explorer.look import LayerLook
from ermoe.nn import moe_layers

NAMES = {"wm": "white matter", "gm": "grey matter", "csf": "fluid"}
_VIEWS = {"sagittal": 0, "coronal": 1, "axial": 2}


class _Seen:
    """Running totals of one layer."""

    def __init__(self, num_experts: int, num_cubes: int) -> None:
        self.best: list[list[BestPatch]] = [[] for _ in range(num_experts)]
        self.place_SE = torch.zeros(num_cubes, num_experts, dtype=torch.float64)
        self.shuffled_SE = torch.zeros_like(self.place_SE)
        self.weight_E = torch.zeros(num_experts, dtype=torch.float64)
        self.tissue_E3 = torch.zeros(num_experts, len(TISSUES), dtype=torch.float64)
        self.shuffled_KE3 = torch.zeros(SHUFFLES, num_experts, len(TISSUES), dtype=torch.float64)


class CubeCards:
    """Of one network; grows scan by scan."""

    def __init__(self, network: nn.Module, grid: tuple[int, int, int], edge: int, *, seed: int = 0) -> None:
        self.network, self.grid, self.edge, self.num_scans = network, grid, edge, 0
        self.layers = moe_layers(network)
        num_cubes = grid[0] * grid[1] * grid[2]
        self._seen = {name: _Seen(layer.experts.num_experts, num_cubes) for name, layer in self.layers.items()}
        self._generator = torch.Generator().manual_seed(seed)
        self._neighbours = Neighbours(self.layers)

    def add(self, cubes: Cubes) -> None:
        """Runs the network on a scan, and counts."""
        slices = Slices(cubes, self.edge)
        for name, layer in layers_of(cubes, self.network).items():
            self._add_counts(self._seen[name], layer.weight_TE, cubes)
            self._add_best(self._seen[name], layer, slices)
        self.num_scans += 1

    def _add_counts(self, seen: _Seen, weight_SE: Tensor, cubes: Cubes) -> None:
        used_SE = weight_SE > 0
        real_S = used_SE.any(1).nonzero().flatten()
        seen.place_SE += used_SE
        seen.shuffled_SE[real_S] += used_SE[real_S[torch.randperm(len(real_S), generator=self._generator)]]
        seen.weight_E += weight_SE.double().sum(0)
        own_E3, shuffled_KE3, _ = tissue_sums(used_SE, cubes.tissue_S3, self._generator)
        seen.tissue_E3 += own_E3
        seen.shuffled_KE3 += shuffled_KE3

    def _add_best(self, seen: _Seen, layer: LayerLook, slices: Slices) -> None:
        score_SE = layer.weight_TE if layer.score_TE is None else layer.score_TE
        score_SE = score_SE.masked_fill(~layer.weight_TE.gt(0).any(1, keepdim=True), -torch.inf)
        score_E, cube_E = score_SE.max(0)
        for best, score, cube in zip(seen.best, score_E.tolist(), cube_E.tolist(), strict=True):
            if is_among_best(best, score):
                keep_best(best, BestPatch(self.num_scans, cube, score, slices.around(cube)))

    def card(self, layer: str, expert: int) -> Card:
        """What is known of one expert so far; at least one scan must have been seen."""
        seen = self._seen[layer]
        number_E = seen.place_SE.sum(0)
        taken = number_E[expert].clamp_min(1)
        shuffled_K3 = seen.shuffled_KE3[:, expert] / taken
        figures = zip(
            (seen.tissue_E3[expert] / taken).tolist(),
            shuffled_K3.mean(0).tolist(),
            shuffled_K3.std(0).tolist(),
            strict=True,
        )
        return Card(
            layer=layer,
            expert=expert,
            num_experts=len(number_E),
            num_images=self.num_scans,
            load=float(number_E[expert] / number_E.sum()),
            weight=float(seen.weight_E[expert] / seen.weight_E.sum()),
            best=list(seen.best[expert]),
            classes=[],
            best_shuffled=0.0,
            class_bits=(0.0, 0.0),
            place_bits=(bits(seen.place_SE, expert), bits(seen.shuffled_SE, expert)),
            places=self._places(seen, expert),
            neighbours=self._neighbours.of(layer, expert),
            tissues=dict(zip((NAMES[name] for name in TISSUES), figures, strict=True)) if number_E[expert] else {},
            nouns=("cube", "scan"),
        )

    def _places(self, seen: _Seen, expert: int) -> dict[str, Tensor]:
        """Its share of the choices seen along each axis, as pictures whose upper end is the brain's upper or front."""
        own, every = (count_S.view(self.grid) for count_S in (seen.place_SE[:, expert], seen.place_SE.sum(1)))
        return {name: (own.sum(axis) / every.sum(axis)).T.flip(0) for name, axis in _VIEWS.items()}

    def all_cards(self, words: Words | None = None) -> Iterator[Card]:
        """Of every expert of every layer; there are no words for cubes."""
        for name, layer in self.layers.items():
            yield from (self.card(name, expert) for expert in range(layer.experts.num_experts))


class Slices:
    """A scan to cut pictures of cubes from."""

    def __init__(self, cubes: Cubes, edge: int) -> None:
        self.grid, self.edge = cubes.grid, edge
        grey_XYZ = torch.from_numpy(grey(cubes.volume))
        missing = [size * edge - own for size, own in zip(cubes.grid, grey_XYZ.shape, strict=True)]
        self.grey_XYZ = F.pad(grey_XYZ, [way for own in reversed(missing) for way in (0, own)])

    def around(self, cube: int) -> Image.Image:
        """The axial slice through the middle of a cube: it and its neighbours, the front of the brain above."""
        width, height, depth = self.grid
        x, y, z = cube // (height * depth), cube // depth % height, cube % depth
        slice_YX = self.grey_XYZ[:, :, z * self.edge + self.edge // 2].T.flip(0)
        patch = (height - 1 - y) * width + x
        return surroundings(slice_YX.expand(3, -1, -1), patch, (height, width))
