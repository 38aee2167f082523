"""Region experts: forcing tokens of isolated tissues to the tissues' own experts, and probing who is chosen freely.

Experts 0, 1, 2 of every layer are those of white matter, grey matter and fluid; the others are free.

Letters: B volumes, G = B groups of S tokens, T = G·S tokens, D width, E experts, K experts per token, r routing rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.brain.batches import ScanSet, VolumeBatch, every_scan
from ermoe.brain.data.scans import TISSUES
from ermoe.brain.estimation import Estimation, Lesson, as_model
from ermoe.brain.recipes import BrainRecipe
from ermoe.errors import UserError
from ermoe.nn import Context, EigenMoE, PrototypeScore, Routing, moe_layers
from ermoe.nn.scores import cosine, project
from ermoe.nn.sharding import everywhere
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader

NUM_REGIONS = len(TISSUES)
_RECOGNITION_TEMPERATURE = 0.1


def expert_name(expert: int) -> str:
    """The paper's names.

    >>> expert_name(2), expert_name(3)
    ('csf_expert', 'free_expert0')
    """
    return f"{TISSUES[expert]}_expert" if expert < NUM_REGIONS else f"free_expert{expert - NUM_REGIONS}"


@contextmanager
def forced(model: nn.Module, expert_G: Tensor) -> Iterator[None]:
    """Within the block, every layer sends all tokens of volume g to expert ``expert_G[g]``."""
    layers = _eigen_layers(model).values()
    for layer in layers:
        layer.forced_G = expert_G
    try:
        yield
    finally:
        for layer in layers:
            layer.forced_G = None


def _eigen_layers(model: nn.Module) -> dict[str, EigenMoE]:
    found = moe_layers(model)
    layers = {name: layer for name, layer in found.items() if isinstance(layer, EigenMoE)}
    if len(layers) < len(found):
        raise UserError("only the routers of ERMoE layers can be forced: build the model with method 'ermoe'")
    return layers


class RegionWarmStart(Estimation):
    """Trains each region expert on volumes that hold nothing but its tissue.

    The training set is a `ScanSet` with ``regions=True``; everything that is not an expert is trained along. Beside
    the loss of the ages, scores learn to tell tissues apart: the cross-entropy of softmax(score / 0.1) with the
    tissue's own expert, over the cubes that contain the tissue. Otherwise nothing would keep the bases of two region
    experts from seeing both tissues alike. ψ of the region experts is the mean direction of the batch's own tokens
    here, as `point_prototypes` will set it afterwards, so that bases learn to separate tissues with that ψ.
    """

    def loss(self, network: nn.Module, batch: VolumeBatch) -> Tensor:
        assert batch.region_B is not None
        layers = _eigen_layers(self.model)
        with forced(self.model, batch.region_B), _entering(layers) as seen:
            loss = super().loss(network, batch)
        recognition = [_recognition_loss(layer, *seen[name], batch.region_B) for name, layer in layers.items()]
        return loss + torch.stack(recognition).mean()


def _recognition_loss(
    layer: EigenMoE, x_GSD: Tensor, context_GSD: Tensor | None, mask_GS: Tensor, region_G: Tensor
) -> Tensor:
    score = layer.score
    assert score is not None
    own_GS = region_G.unsqueeze(1).expand(mask_GS.shape)
    cube_GS = mask_GS.clone()
    cube_GS[:, 0] = False  # the class token is no place
    basis_EDR = layer.experts.token_basis
    if isinstance(score, PrototypeScore):
        sum_Rr = _direction_sums(layer, x_GSD, mask_GS, region_G)
        psi_Er = torch.cat([sum_Rr, everywhere(score.psi)[NUM_REGIONS:]])  # after its pass FSDP keeps a part of it
        basis_EDr = score.routing_basis(basis_EDR)
        assert basis_EDr is not None
        score_TE = cosine(project(x_GSD[cube_GS], basis_EDr), psi_Er)
    else:
        score_TE = score(x_GSD[cube_GS], None if context_GSD is None else context_GSD[cube_GS], basis_EDR)
    return nn.functional.cross_entropy(score_TE / _RECOGNITION_TEMPERATURE, own_GS[cube_GS])


class ProbedEstimation(Estimation):
    """`Estimation` that, after chosen epochs, also writes down which experts isolated tissues would choose."""

    def __init__(self, lesson: Lesson, recipe: BrainRecipe, compute: Compute) -> None:
        super().__init__(lesson, recipe, compute)
        self.probe_loader = None if lesson.probe is None else every_scan(lesson.probe, compute)
        self.judged_after = () if lesson.probe is None else (*recipe.probe_epochs, recipe.training.epochs)

    def evaluate(self) -> dict[str, float]:
        """Errors, and after chosen epochs ``probe/TISSUE/EXPERT``: mean plain scores at the last expert layer."""
        figures = super().evaluate()
        if self.probe_loader is not None and self._epoch + 1 in self.judged_after:
            score_RE = probe_regions(self.model, self.probe_loader).score_RE
            for tissue, score_E in zip(TISSUES, score_RE.tolist(), strict=True):
                figures |= {f"probe/{tissue}/{expert_name(expert)}": score for expert, score in enumerate(score_E)}
        return figures


@torch.no_grad()
def point_prototypes(model: nn.Module, loader: Loader[VolumeBatch]) -> None:
    """Sets ψ of every region expert to the mean direction of its tissue's tokens in its own basis.

    ψ_e ∝ Σ_T Uᵀx / ‖Uᵀx‖ over the tokens that contain tissue e, as they enter the layer while routing is forced. Layers
    whose score has no ψ are left alone.
    """
    layers = {name: layer for name, layer in _eigen_layers(model).items() if isinstance(layer.score, PrototypeScore)}
    psi = {name: layer.score.psi for name, layer in layers.items() if isinstance(layer.score, PrototypeScore)}
    sums = {name: torch.zeros_like(psi_Er[:NUM_REGIONS]) for name, psi_Er in psi.items()}
    model.eval()
    for batch in loader:
        assert batch.region_B is not None
        with forced(model, batch.region_B), _entering(layers) as seen:
            model(as_model(model, batch.input_BCXYZ), batch.mask_BXYZ)
        for name, (x_GSD, _, mask_GS) in seen.items():
            sums[name] += _direction_sums(layers[name], x_GSD, mask_GS, batch.region_B)
    for name, psi_Er in psi.items():
        length = sums[name].norm(dim=1, keepdim=True)
        psi_Er[:NUM_REGIONS] = torch.where(length > 0, sums[name] / length, psi_Er[:NUM_REGIONS])


def _direction_sums(layer: EigenMoE, x_GSD: Tensor, mask_GS: Tensor, region_G: Tensor) -> Tensor:
    """Σ Uᵀx / ‖Uᵀx‖ over the cubes of each region, (3, r); the class token, which is no place, is left out."""
    assert layer.score is not None
    basis_EDr = layer.score.routing_basis(layer.experts.token_basis)
    assert basis_EDr is not None
    direction_TEr = nn.functional.normalize(project(x_GSD[:, 1:].flatten(0, 1), basis_EDr), dim=-1)
    direction_GSEr = direction_TEr.view(*x_GSD[:, 1:].shape[:2], *direction_TEr.shape[1:])
    total = []
    for region in range(NUM_REGIONS):
        wanted_GS = mask_GS[:, 1:] & (region_G == region).unsqueeze(1)
        total.append(direction_GSEr[wanted_GS][:, region].sum(0))
    return torch.stack(total)


@contextmanager
def _entering(layers: Mapping[str, nn.Module]) -> Iterator[dict[str, tuple[Tensor, Tensor | None, Tensor]]]:
    """Collects what enters each layer in one forward pass: tokens, their context and which of them are real."""
    seen: dict[str, tuple[Tensor, Tensor | None, Tensor]] = {}

    def remember(name: str) -> Any:
        def keep(x: Tensor, context: Tensor | Context | None = None, mask: Tensor | None = None) -> None:
            context = context.averaged(x) if isinstance(context, Context) else context
            real = torch.ones(x.shape[:2], dtype=torch.bool, device=x.device) if mask is None else mask
            seen[name] = (x, context, real)

        return lambda module, args, kwargs: keep(*args, **kwargs)

    handles = [layer.register_forward_pre_hook(remember(name), with_kwargs=True) for name, layer in layers.items()]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


@dataclass(frozen=True, slots=True)
class RegionProbe:
    """Mean plain scores (3, E) of isolated tissues at the last expert layer: row wm, gm, csf, column expert."""

    score_RE: Tensor
    num_tokens: tuple[int, int, int]

    @property
    def first(self) -> tuple[int, ...]:
        """The best expert of each region; (0, 1, 2) when each goes to its own."""
        return tuple(int(expert) for expert in self.score_RE.argmax(1))


def probe_regions(model: nn.Module, loader: Loader[VolumeBatch]) -> RegionProbe:
    """Which experts isolated tissues of held-out people score highest: tokens that contain the tissue, no offsets."""
    found: list[list[Tensor]] = [[] for _ in TISSUES]
    for batch, score_GSE, real_GS in _scored(model, loader):
        assert batch.region_B is not None
        for region, own in enumerate(found):
            own.append(score_GSE[real_GS & (batch.region_B.cpu() == region).unsqueeze(1)])
    wm_TE, gm_TE, csf_TE = (torch.cat(own) for own in found)
    mean_RE = torch.stack([score_TE.sum(0) / max(1, len(score_TE)) for score_TE in (wm_TE, gm_TE, csf_TE)])
    return RegionProbe(mean_RE, (len(wm_TE), len(gm_TE), len(csf_TE)))


@torch.no_grad()
def _scored(model: nn.Module, loader: Loader[VolumeBatch]) -> Iterator[tuple[VolumeBatch, Tensor, Tensor]]:
    """Every batch with the plain scores (G, S − 1, E) of its cubes at the last expert layer, in float64, and which of
    them are real; the class token is left out."""
    layers = moe_layers(model)
    if not layers:
        raise UserError("the region probe needs a model with experts: this one has none")
    layer = list(layers.values())[-1]
    routings: list[Routing] = []
    model.eval()
    layer.observers.append(routings.append)
    try:
        for batch in loader:
            model(as_model(model, batch.input_BCXYZ), batch.mask_BXYZ)
            routing, num_groups = routings.pop(), len(batch.age_B)
            assert routing.score_TE is not None
            score_GSE = routing.score_TE.double().cpu().view(num_groups, -1, routing.num_experts)
            real_GS = torch.ones(score_GSE.shape[:2], dtype=torch.bool)
            if routing.mask_T is not None:
                real_GS = routing.mask_T.cpu().view(num_groups, -1)
            yield batch, score_GSE[:, 1:], real_GS[:, 1:]
    finally:
        layer.observers.remove(routings.append)


def tissue_score_correlation(
    model: nn.Module, volumes: ScanSet, compute: Compute | None = None, *, patch_size: int
) -> Tensor:
    """Correlation (3, E) over the cubes of whole scans: share of a tissue in a cube with its score for an expert.

    ``volumes`` is a `ScanSet` of whole scans that have tissue maps; the last expert layer is read.
    """
    shares, scores = [], []
    for number, (_, (score_SE,), (real_S,)) in enumerate(_scored(model, every_scan(volumes, compute, batch_size=1))):
        shares.append(_cube_shares(volumes, number, patch_size)[real_S])
        scores.append(score_SE[real_S])
    variable_VN = torch.cat([torch.cat(shares), torch.cat(scores)], dim=1).T
    return torch.corrcoef(variable_VN)[:NUM_REGIONS, NUM_REGIONS:].nan_to_num(0.0)  # 0 for what never changes


def _cube_shares(volumes: ScanSet, index: int, patch_size: int) -> Tensor:
    """Mean share of each tissue in every cube, (S, 3), in the order of tokens."""
    volume = volumes.cache.volume(volumes.scans[index], with_tissue=True)
    tissue = torch.tensor(volume.tissue_3XYZ).unsqueeze(0).float()
    pooled = nn.functional.avg_pool3d(tissue, patch_size, ceil_mode=True, count_include_pad=True)
    return pooled.flatten(2)[0].T.double()
