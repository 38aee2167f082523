"""An expert's card: what it likes best, how its patches differ from the others, and who resembles it.

Whatever could be chance stands beside a shuffled baseline: labels dealt out to other images, patches to other places.

Letters: N images, B of them at a time, h × w patches, P = h·w of them, E experts, C classes, A attributes of a patch,
S pixels of a side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.analysis.summary import routing_basis
from ermoe.data.augment import Batch
from ermoe.nn import MixtureLayer, Routing, moe_layers
from ermoe.nn.scores import PrototypeScore

PATCHES = 12
"""Best patches kept of each expert, each of another image."""
ATTRIBUTES = ("brightness", "contrast", "saturation", "warmth", "distance from the middle")
_SHUFFLES = 20
_TILE = 64
_NAMED = 5


@dataclass(frozen=True, slots=True)
class BestPatch:
    """Where in the data set a patch is, how well it fits, and how it looks with its neighbours around it."""

    image: int
    patch: int
    score: float
    picture: Image.Image


@dataclass(frozen=True, slots=True)
class Card:
    """Everything about one expert of one layer.

    Args:
        load: its share of all choices, ``weight`` of all mixing weights.
        best: patches with the highest score, best first, one an image.
        classes: (name, share of that class's choices that fell on this expert), largest first.
        best_shuffled: what the first of them has in the mean when labels are shuffled.
        class_bits, place_bits: how far its choices are from those of all experts over classes and over places, in bits;
            each with the figure that shuffling alone gives.
        places: by view, (rows, columns): by place, its share of the choices there; one view of images, called "".
        looks: attribute → (mean over its patches, the same when its patches are dealt out at random), both in standard
            deviations of all patches.
        tissues: of brains, tissue → (its share of the cubes, the same when experts are dealt out at random, and the
            standard deviation of that).
        neighbours: (expert, overlap of the routing subspaces, their smallest angle in degrees), nearest first; of
            experts that share a subspace, that of the directions they compare tokens with.
        words: captions nearest to what it takes.
        nouns: what it takes, and what that is a part of.
    """

    layer: str
    expert: int
    num_experts: int
    num_images: int
    load: float
    weight: float
    best: Sequence[BestPatch]
    classes: Sequence[tuple[str, float]]
    best_shuffled: float
    class_bits: tuple[float, float]
    place_bits: tuple[float, float]
    places: Mapping[str, Tensor]
    neighbours: Sequence[tuple[int, float, float]]
    looks: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    tissues: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    words: Sequence[str] = ()
    nouns: tuple[str, str] = ("patch", "image")


Words = Callable[["Cards", str, int], Sequence[str]]
"""Captions for an expert of a layer, from what cards know."""


class _Seen:
    """Running totals of one layer."""

    def __init__(self, num_experts: int, num_patches: int) -> None:
        zeros = partial(torch.zeros, dtype=torch.float64)
        self.best: list[list[BestPatch]] = [[] for _ in range(num_experts)]
        self.image_count: list[Tensor] = []  # (B, E), of each image
        self.place_PE = zeros(num_patches, num_experts)
        self.shuffled_PE = zeros(num_patches, num_experts)
        self.weight_E = zeros(num_experts)
        self.look_EA = zeros(num_experts, len(ATTRIBUTES))
        self.shuffled_look_EA = zeros(num_experts, len(ATTRIBUTES))


class Cards:
    """Grows image by image, and says what it knows so far."""

    def __init__(self, model: nn.Module, grid_hw: tuple[int, int], classes: Sequence[str], *, seed: int = 0) -> None:
        self.model, self.grid_hw, self.classes = model, grid_hw, list(classes)
        self.layers = moe_layers(model)
        num_patches = grid_hw[0] * grid_hw[1]
        self._seen = {name: _Seen(layer.experts.num_experts, num_patches) for name, layer in self.layers.items()}
        self._labels: list[int] = []
        self._index: list[int] = []
        self._look_sum = torch.zeros(2, len(ATTRIBUTES), dtype=torch.float64)  # of the attributes, and of their squares
        self._generator = torch.Generator().manual_seed(seed)
        self._neighbours = Neighbours(self.layers)

    @property
    def num_images(self) -> int:
        """Seen so far."""
        return len(self._labels)

    @torch.no_grad()
    def add(self, batch: Batch, pixel_B3SS: Tensor) -> Tensor:
        """Runs the model on a batch, in its device and precision, and counts; returns what the model says.

        ``pixel_B3SS`` are the bytes that the images were made of.
        """
        assert batch.index is not None
        weights, scores, output = self._recorded(batch.image)
        attribute_BPA = attributes(pixel_B3SS, self.grid_hw)
        flat = attribute_BPA.flatten(0, 1).double()
        self._look_sum += torch.stack([flat.sum(0), flat.square().sum(0)])
        deal_BP = torch.rand(attribute_BPA.shape[:2], generator=self._generator).argsort(1)
        for name, weight_BPE in weights.items():
            self._add_counts(self._seen[name], weight_BPE, attribute_BPA, deal_BP)
            self._add_best(self._seen[name], scores.get(name, weight_BPE), batch.index.tolist(), pixel_B3SS)
        self._labels += batch.label.tolist()
        self._index += batch.index.tolist()
        return output

    def _recorded(self, image_B3SS: Tensor) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
        """By layer the weights (B, P, E) and, where there are such, the scores of all patches; and the output."""
        weights: dict[str, Tensor] = {}
        scores: dict[str, Tensor] = {}
        num_patches, batch_size = self.grid_hw[0] * self.grid_hw[1], len(image_B3SS)

        def of_patches(value_TE: Tensor) -> Tensor:
            return value_TE.float().cpu().view(batch_size, -1, value_TE.shape[-1])[:, -num_patches:]

        def keep(name: str, routing: Routing) -> None:
            weights[name] = of_patches(routing.dense_weights())
            if routing.score_TE is not None:
                scores[name] = of_patches(routing.score_TE)

        observers = {name: partial(keep, name) for name in self.layers}
        for name, layer in self.layers.items():
            layer.observers.append(observers[name])
        try:
            output = self.model.eval()(image_B3SS)
        finally:
            for name, layer in self.layers.items():
                layer.observers.remove(observers[name])
        return weights, scores, output[0] if isinstance(output, tuple) else output

    def _add_counts(self, seen: _Seen, weight_BPE: Tensor, attribute_BPA: Tensor, deal_BP: Tensor) -> None:
        used_BPE = (weight_BPE > 0).double()
        dealt_BPE = used_BPE.gather(1, deal_BP.unsqueeze(-1).expand_as(used_BPE))
        seen.image_count.append(used_BPE.sum(1))
        seen.place_PE += used_BPE.sum(0)
        seen.shuffled_PE += dealt_BPE.sum(0)
        seen.weight_E += weight_BPE.double().sum((0, 1))
        attribute_BPA = attribute_BPA.double()
        seen.look_EA += torch.einsum("bpe,bpa->ea", used_BPE, attribute_BPA)
        # Of another image too, where there is one: within an image, its brightness would remain.
        order = torch.randperm(attribute_BPA.shape[0] * attribute_BPA.shape[1], generator=self._generator)
        shuffled_BPA = attribute_BPA.flatten(0, 1)[order].view_as(attribute_BPA)
        seen.shuffled_look_EA += torch.einsum("bpe,bpa->ea", used_BPE, shuffled_BPA)

    def _add_best(self, seen: _Seen, score_BPE: Tensor, index: Sequence[int], pixel_B3SS: Tensor) -> None:
        score_BE, patch_BE = score_BPE.max(1)
        for expert, best in enumerate(seen.best):
            leading = score_BE[:, expert].topk(min(PATCHES, len(index))).indices.tolist()
            for row in (row for row in leading if is_among_best(best, float(score_BE[row, expert]))):
                patch, score = int(patch_BE[row, expert]), float(score_BE[row, expert])
                keep_best(best, BestPatch(index[row], patch, score, surroundings(pixel_B3SS[row], patch, self.grid_hw)))

    def counts(self, layer: str) -> tuple[list[int], Tensor]:
        """The numbers of the images seen, and how often their patches chose each expert, (N, E)."""
        return list(self._index), torch.cat(self._seen[layer].image_count)

    def card(self, layer: str, expert: int, words: Sequence[str] = ()) -> Card:
        """What is known of one expert so far; at least one image must have been seen."""
        seen = self._seen[layer]
        count_NE = torch.cat(seen.image_count)
        label_N = torch.tensor(self._labels)
        own_C, shuffled_KC, class_bits = self._class_figures(count_NE, label_N, expert)
        order = own_C.nan_to_num(-1).argsort(descending=True)[:_NAMED].tolist()
        return Card(
            layer=layer,
            expert=expert,
            num_experts=count_NE.shape[1],
            num_images=self.num_images,
            load=float(count_NE[:, expert].sum() / count_NE.sum()),
            weight=float(seen.weight_E[expert] / seen.weight_E.sum()),
            best=list(seen.best[expert]),
            classes=[(self.classes[c], float(own_C[c])) for c in order if own_C[c] > 0 and self.classes[c]],
            best_shuffled=float(shuffled_KC.nan_to_num(-1).amax(1).mean()),
            class_bits=class_bits,
            place_bits=(bits(seen.place_PE, expert), bits(seen.shuffled_PE, expert)),
            places={"": (seen.place_PE[:, expert] / seen.place_PE.sum(1)).view(self.grid_hw)},
            looks=self._looks(seen, expert),
            neighbours=self._neighbours.of(layer, expert),
            words=words,
        )

    def _class_figures(
        self, count_NE: Tensor, label_N: Tensor, expert: int
    ) -> tuple[Tensor, Tensor, tuple[float, float]]:
        """By class the share of its choices that fell on the expert, (C,); shuffled, (K, C); and both in bits."""
        generator = torch.Generator().manual_seed(expert)
        deals = [torch.arange(len(label_N))]
        deals += [torch.randperm(len(label_N), generator=generator) for _ in range(_SHUFFLES)]
        tables = [
            count_NE.new_zeros(len(self.classes), count_NE.shape[1]).index_add_(0, label_N[deal], count_NE)
            for deal in deals
        ]
        share_KC = torch.stack([table_CE[:, expert] / table_CE.sum(1) for table_CE in tables])
        own, *shuffled = (bits(table_CE, expert) for table_CE in tables)
        return share_KC[0], share_KC[1:], (own, sum(shuffled) / _SHUFFLES)

    def _looks(self, seen: _Seen, expert: int) -> dict[str, tuple[float, float]]:
        num_patches = self.num_images * self.grid_hw[0] * self.grid_hw[1]
        mean_A, square_A = self._look_sum / num_patches
        sd_A = (square_A - mean_A.square()).clamp_min(1e-12).sqrt()
        number = float(seen.place_PE[:, expert].sum()) or 1.0
        own_A, shuffled_A = (
            (total_EA[expert] / number - mean_A) / sd_A for total_EA in (seen.look_EA, seen.shuffled_look_EA)
        )
        pairs = zip(own_A.tolist(), shuffled_A.tolist(), strict=True)
        return dict(zip(ATTRIBUTES, pairs, strict=True))

    def all_cards(self, words: Words | None = None) -> Iterator[Card]:
        """Of every expert of every layer."""
        for name, layer in self.layers.items():
            for expert in range(layer.experts.num_experts):
                yield self.card(name, expert, () if words is None else words(self, name, expert))


class Neighbours:
    """Which experts of a layer resemble each other; what is compared is computed once."""

    def __init__(self, layers: Mapping[str, MixtureLayer]) -> None:
        self._layers = layers
        self._cosines: dict[str, Tensor | None] = {}

    def of(self, layer: str, expert: int) -> list[tuple[int, float, float]]:
        """(expert, overlap, smallest angle in degrees) of all others, nearest first; none where there is no angle."""
        if layer not in self._cosines:
            self._cosines[layer] = subspace_cosines(self._layers[layer])
        cosine_EEr = self._cosines[layer]
        if cosine_EEr is None:
            return []
        overlap_E = cosine_EEr[expert].square().mean(-1)
        angle_E = torch.rad2deg(cosine_EEr[expert, :, 0].clamp(-1, 1).acos())
        order = [e for e in cosine_EEr[expert].mean(-1).argsort(descending=True).tolist() if e != expert]
        return [(e, float(overlap_E[e]), float(angle_E[e])) for e in order]


def is_among_best(best: Sequence[BestPatch], score: float) -> bool:
    """Whether a patch with this score is to be kept."""
    return len(best) < PATCHES or score > best[-1].score


def keep_best(best: list[BestPatch], found: BestPatch) -> None:
    """Takes one in, best first, and lets the last go where there are too many."""
    best.append(found)
    best.sort(key=lambda own: -own.score)
    del best[PATCHES:]


def subspace_cosines(layer: MixtureLayer) -> Tensor | None:
    """Cosines of the principal angles between what experts compare tokens with, (E, E, r); None if that has no angle.

    That is a subspace of each expert; where all share one, a direction in it, (E, E, 1).
    """
    basis_EDr = routing_basis(layer)
    if basis_EDr is None:
        return None
    if len(basis_EDr) > 1:
        return measures.principal_cosines(basis_EDr)
    assert isinstance(layer.score, PrototypeScore)  # nothing else tells experts apart that share a basis
    psi_Er = F.normalize(layer.score.psi.detach().double().cpu(), dim=-1)
    return (psi_Er @ psi_Er.mT).unsqueeze(-1)


def bits(count_GE: Tensor, expert: int) -> float:
    """Σ p(g|e) log₂ p(g|e) / p(g) over groups g: what knowing that this expert was chosen tells about the group.

    >>> bits(torch.tensor([[5, 5], [0, 10]]), 0)
    1.0
    """
    own_G, all_G = count_GE[:, expert].double(), count_GE.sum(1).double()
    own_G, all_G = own_G / own_G.sum(), all_G / all_G.sum()
    terms_G = torch.where(own_G > 0, own_G * (own_G / all_G).log2(), 0)
    return max(0.0, float(terms_G.sum()))


def attributes(pixel_B3SS: Tensor, grid_hw: tuple[int, int]) -> Tensor:
    """How each patch looks, (B, P, A), one column for each of `ATTRIBUTES`.

    >>> white = torch.full((1, 3, 4, 4), 255, dtype=torch.uint8)
    >>> attributes(white, (2, 2))[0, 0].double().round(decimals=2).tolist()
    [1.0, 0.0, 0.0, 0.0, 0.71]
    """
    value = pixel_B3SS.float().cpu() / 255
    patch_BCP = F.adaptive_avg_pool2d(value, grid_hw).flatten(2)
    grey = value.mean(1, keepdim=True)
    mean_BP = F.adaptive_avg_pool2d(grey, grid_hw).flatten(1)
    square_BP = F.adaptive_avg_pool2d(grey.square(), grid_hw).flatten(1)
    contrast_BP = (square_BP - mean_BP.square()).clamp_min(0).sqrt()
    saturation_BP = patch_BCP.amax(1) - patch_BCP.amin(1)
    warmth_BP = patch_BCP[:, 0] - patch_BCP[:, 2]
    row, column = (torch.linspace(-1 + 1 / size, 1 - 1 / size, size) for size in grid_hw)
    distance_P = (row.square().unsqueeze(1) + column.square()).sqrt().flatten()
    return torch.stack([mean_BP, contrast_BP, saturation_BP, warmth_BP, distance_P.expand_as(mean_BP)], -1)


def surroundings(pixel_3SS: Tensor, patch: int, grid_hw: tuple[int, int]) -> Image.Image:
    """A patch and its eight neighbours, all but the patch itself dimmed."""
    height, width = pixel_3SS.shape[-2] // grid_hw[0], pixel_3SS.shape[-1] // grid_hw[1]
    row, column = divmod(patch, grid_hw[1])
    padded = F.pad(pixel_3SS.float(), (width, width, height, height), value=128.0)
    crop = padded[:, row * height : (row + 3) * height, column * width : (column + 3) * width].clone()
    centre = crop[:, height : 2 * height, width : 2 * width].clone()
    crop = 0.45 * crop + 0.55 * 128
    crop[:, height : 2 * height, width : 2 * width] = centre
    picture = Image.fromarray(crop.byte().permute(1, 2, 0).numpy())
    return picture.resize((_TILE, _TILE), Image.Resampling.BICUBIC)
