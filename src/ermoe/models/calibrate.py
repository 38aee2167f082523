"""Offsets and thresholds from a few unlabelled batches, before any training.

Equal load is the optimum of a convex function of the offsets o, Σ_t (sum of the k largest s_te + o_e) − (load a share)
· Σ_e o_e, whose slope in o_e is the load of expert e minus its share. It is descended one expert at a time: with the
others held, the offset that gives expert e exactly its share is an order statistic of its margins.

Letters: G images of S tokens, T tokens, E experts, K experts per token.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.passes import refuse_tensor, run
from ermoe.nn import MeanBalance, MixtureLayer, TopKRouter, moe_layers

_MAX_THRESHOLD = 1 - 1e-6
_CANDIDATES = 24
_MAX_TOKENS = 32_768
_EQUAL_ENOUGH = 1e-6
_MAX_SWEEPS = 60
_PATIENCE = 4
_BUDGET_MISSED = 0.05

_log = logging.getLogger("ermoe")


@dataclass(frozen=True, slots=True)
class Calibration:
    """What `calibrate` chose for one layer, and what it does to the tokens it was chosen on.

    ``load_cv2`` is the variance of the experts' loads over their squared mean; ``experts_per_token`` counts after
    pruning and before drops; ``drop_rate`` is the share of chosen pairs that find their expert full.
    """

    threshold: float
    load_cv2: float
    experts_per_token: float
    drop_rate: float
    num_tokens: int


def calibrate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: float | None = None,
    capacity_factor: float | None = None,
    max_tokens: int = _MAX_TOKENS,
    rounds: int = 2,
    seed: int = 0,
) -> dict[str, Calibration]:
    """Solves every layer's offsets for equal load, and on request its threshold T, in place; no labels, no gradients.

    Args:
        model: a sparse model.
        batches: a few batches of images; what a data loader yields will do, labels are ignored.
        budget: mean number of experts per token, between 1 and K, that T should bring about. Needs layers that prune
            (``below_threshold="prune"``).
        capacity_factor: gives every expert this capacity and, where layers prune and there is no budget, chooses the
            T at which the smallest share of the chosen pairs is dropped.
        max_tokens: tokens per layer whose scores are kept, whole images drawn at random.
        rounds: passes over the batches. Offsets of one layer move the tokens of the next as soon as experts differ,
            so a second pass refines; with the equal experts of a fresh model it changes nothing.
        seed: of the drawing of images.

    Returns:
        What was chosen, by layer name.
    """
    _check(batches, capacity_factor, rounds)
    routers = _routers(model, budget)
    batches = list(batches) if rounds > 1 else batches
    chosen: dict[str, Calibration] = {}
    for _ in range(rounds):
        samples = _sample_scores(model, routers, batches, max_tokens, seed)
        for name, router in routers.items():
            if capacity_factor is not None:
                router.capacity_factor = capacity_factor
            chosen[name] = _settle(router, samples[name], budget)
    for name, result in chosen.items():
        if budget is not None and abs(result.experts_per_token - budget) > _BUDGET_MISSED:
            _log.warning("%s: %s", name, _why_missed(result, budget))
    return chosen


def settle_offsets(model: nn.Module, batches: Iterable[Any], *, rounds: int = 2) -> bool:
    """Solves every layer's offsets anew, in place, and leaves thresholds as they are; whether there were any.

    Training finds offsets for augmented images; for plain ones they are a little off, as batch-norm statistics are.
    ``rounds`` are those of `calibrate`. Nothing is done to a model without offsets.
    """
    routers = {name: router for name, router in _top_k_routers(model).items() if router.balance is not None}
    batches = list(batches) if routers and rounds > 1 else batches
    for _ in range(rounds if routers else 0):
        samples = _sample_scores(model, routers, batches, _MAX_TOKENS, seed=0)
        for name, router in routers.items():
            _set(router, samples[name].scores(), router.threshold)
    return bool(routers)


def _check(batches: object, capacity_factor: float | None, rounds: int) -> None:
    refuse_tensor(batches)
    if rounds < 1:
        raise UserError(f"rounds={rounds}: need at least one pass over the batches")
    if capacity_factor is not None and not capacity_factor > 0:
        raise UserError(f"capacity_factor={capacity_factor}: use a positive number, or None to leave it as it is")


def _why_missed(result: Calibration, budget: float) -> str:
    found = f"{result.experts_per_token:.2f} experts a token, not {budget:.2f}"
    if result.threshold == 0 and result.experts_per_token < budget:
        return f"T = 0 still prunes to {found}"
    return f"T = {result.threshold:.3f} keeps {found}: many scores equal it, and are kept or pruned together"


def _routers(model: nn.Module, budget: float | None) -> dict[str, TopKRouter]:
    """The routers that can be calibrated, by the names of their layers."""
    routers = _top_k_routers(model)
    if not any(router.balance is not None or router.below_threshold == "prune" for router in routers.values()):
        raise UserError(
            "nothing to calibrate: no layer of this model has offsets (balance='offset') or prunes "
            "(below_threshold='prune')"
        )
    for name, router in routers.items():
        if budget is not None and router.below_threshold != "prune":
            raise UserError(
                f"budget={budget}: {name} always uses {router.top_k} experts a token; build the model with "
                "below_threshold='prune' for T to decide"
            )
        if budget is not None and not 1 <= budget <= router.top_k:
            raise UserError(f"budget={budget}: need 1 <= budget <= top_k={router.top_k} experts a token")
    return routers


def _top_k_routers(model: nn.Module) -> dict[str, TopKRouter]:
    return {name: layer.router for name, layer in moe_layers(model).items() if isinstance(layer.router, TopKRouter)}


class _Sample:
    """Scores of whole images, at most ``max_tokens`` tokens: those images whose random key is smallest."""

    def __init__(self, max_tokens: int, seed: int) -> None:
        self._max_tokens = max_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._kept: list[tuple[float, Tensor, Tensor]] = []
        self._num_tokens = 0

    def add(self, score_GSE: Tensor, mask_GS: Tensor) -> None:
        keys = torch.rand(len(score_GSE), generator=self._generator).tolist()
        for key, score_SE, mask_S in zip(keys, score_GSE, mask_GS, strict=True):
            self._kept.append((key, score_SE.clone(), mask_S.clone()))
            self._num_tokens += len(score_SE)
        self._kept.sort(key=lambda image: image[0])
        while len(self._kept) > 1 and self._num_tokens > self._max_tokens:
            self._num_tokens -= len(self._kept.pop()[1])

    def scores(self) -> Tensor:
        """Those of real tokens, (T, E)."""
        return torch.cat([score_SE[mask_S] for _, score_SE, mask_S in self._kept])

    def images(self) -> Iterable[tuple[Tensor, Tensor]]:
        """Stacks of equally long images: scores (G·S, E) and masks (G, S)."""
        by_length: dict[int, list[tuple[Tensor, Tensor]]] = {}
        for _, score_SE, mask_S in self._kept:
            by_length.setdefault(len(score_SE), []).append((score_SE, mask_S))
        for images in by_length.values():
            scores, masks = zip(*images, strict=True)
            yield torch.cat(scores), torch.stack(masks)


def _sample_scores(
    model: nn.Module, names: Iterable[str], batches: Iterable[Any], max_tokens: int, seed: int
) -> dict[str, _Sample]:
    samples = {name: _Sample(max_tokens, seed) for name in names}
    layers = moe_layers(model)
    run(model, batches, {layers[name]: _scorer(sample) for name, sample in samples.items()})
    return samples


def _scorer(sample: _Sample) -> Any:
    def score(layer: MixtureLayer, args: tuple[Tensor, ...], kwargs: dict[str, Tensor], output: Tensor) -> None:
        x = args[0]
        routing = layer.route(*args, **kwargs)
        assert routing.score_TE is not None
        shape_GS = (-1, x.shape[-2])
        score_GSE = routing.score_TE.reshape(*shape_GS, routing.num_experts)
        real_T = torch.ones_like(routing.score_TE[:, 0], dtype=torch.bool) if routing.mask_T is None else routing.mask_T
        sample.add(score_GSE, real_T.reshape(shape_GS))

    return score


@torch.no_grad()
def _settle(router: TopKRouter, sample: _Sample, budget: float | None) -> Calibration:
    """Sets one router's threshold and offsets."""
    score_TE = sample.scores()
    if router.below_threshold == "prune" and budget is not None:
        _set(router, score_TE, threshold_for_budget(score_TE, router.top_k, budget))
    elif router.below_threshold == "prune" and router.capacity_factor is not None:
        candidates = _candidate_thresholds(score_TE, router.top_k)
        drop_rates = []
        for threshold in candidates:
            _set(router, score_TE, threshold)
            drop_rates.append(_measure(router, sample).drop_rate)
        _set(router, score_TE, candidates[drop_rates.index(min(drop_rates))])
    else:
        _set(router, score_TE, router.threshold)
    return _measure(router, sample)


@torch.no_grad()
def _set(router: TopKRouter, score_TE: Tensor, threshold: float) -> None:
    router.threshold = threshold
    if router.balance is not None:
        router.balance.offset_E.copy_(_offsets(router, score_TE))


def _offsets(router: TopKRouter, score_TE: Tensor) -> Tensor:
    if isinstance(router.balance, MeanBalance):  # balance="mean" promises the mean and not equal load
        router.balance.num_updates.clamp_(min=1)
        return -score_TE.mean(0)
    threshold = router.threshold if router.below_threshold == "prune" else None
    return equal_load_offsets(score_TE, router.top_k, threshold=threshold)


def threshold_for_budget(score_TE: Tensor, top_k: int, budget: float) -> float:
    """The T in [0, 1) at which a token keeps ``budget`` experts in the mean, as nearly as T ≥ 0 allows.

    A token keeps its best expert always and the j-th best if it scores at least T, so the mean is
    1 + Σ_{j ≥ 2} P(j-th best score ≥ T): T is an order statistic of the second to K-th best scores.

    >>> score = torch.linspace(0, 1, 1001).repeat(2, 1).T  # two experts, equal scores
    >>> round(threshold_for_budget(score, top_k=2, budget=1.25), 2)
    0.75
    """
    runner_up = score_TE.topk(top_k, dim=1).values[:, 1:].flatten().sort(descending=True).values
    wanted = round((budget - 1) * len(score_TE))
    if wanted <= 0:
        return _MAX_THRESHOLD
    return min(max(float(runner_up[wanted - 1]), 0.0), _MAX_THRESHOLD)


def _candidate_thresholds(score_TE: Tensor, top_k: int) -> list[float]:
    """Thresholds that prune from none to nearly all of the second to K-th choices, in rising order."""
    score_TK = score_TE.topk(top_k, dim=1).values.clamp(0, _MAX_THRESHOLD)
    quantiles = torch.linspace(0, 1, _CANDIDATES, device=score_TE.device)
    position = (quantiles * (score_TK.numel() - 1)).long()
    return [0.0, *score_TK.flatten().sort().values[position].tolist()]


def _measure(router: TopKRouter, sample: _Sample) -> Calibration:
    """What the router does to the sampled images."""
    count_E = torch.zeros(router.num_experts, dtype=torch.double)
    wanted = dropped = num_tokens = 0
    for score_TE, mask_GS in sample.images():
        routing = router.choose(score_TE, mask_GS, num_groups=len(mask_GS))
        num_dropped = 0 if routing.num_dropped is None else int(routing.num_dropped)
        count_E += routing.count_E.cpu()
        dropped += num_dropped
        wanted += int(routing.count_E.sum()) + num_dropped
        num_tokens += int(mask_GS.sum())
    return Calibration(
        threshold=router.threshold,
        load_cv2=float(count_E.var(correction=0) / count_E.mean().square()),
        experts_per_token=wanted / max(num_tokens, 1),
        drop_rate=dropped / max(wanted, 1),
        num_tokens=num_tokens,
    )


@torch.no_grad()
def equal_load_offsets(score_TE: Tensor, top_k: int, *, threshold: float | None = None) -> Tensor:
    """Offsets (E,), of mean zero, for which choosing the ``top_k`` largest score + offset loads all experts equally.

    With a ``threshold``, experts that score below it are not chosen, and a token without any expert above it goes to
    its best one whatever the offsets: then loads are only as equal as the threshold lets them be.

    >>> score = torch.rand(4000, 4, generator=torch.Generator().manual_seed(0)) + torch.tensor([0.5, 0.0, 0.0, 0.0])
    >>> offset = equal_load_offsets(score, top_k=1)
    >>> (score + offset).argmax(1).bincount().tolist()
    [1000, 1000, 1000, 1000]
    """
    num_tokens, num_experts = score_TE.shape
    if num_tokens == 0 or top_k >= num_experts:
        return score_TE.new_zeros(num_experts)
    eligible_TE, fixed_E = _eligibility(score_TE, threshold)
    kept_T = eligible_TE.sum(1).clamp_max(top_k)
    share_E = ((kept_T.sum() + fixed_E.sum()) / num_experts - fixed_E).clamp_min(0)
    open_TE = score_TE.masked_fill(~eligible_TE, -torch.inf)
    reach = (score_TE.max() - score_TE.min()).clamp_min(1e-6)  # beyond it an offset changes nothing more
    best_offset_E = offset_E = score_TE.new_zeros(num_experts)
    best_error, best_sweep = torch.inf, 0
    for sweep in range(_MAX_SWEEPS):
        offset_E = _sweep(open_TE, offset_E, top_k, share_E, reach)
        load_E = _load(open_TE + offset_E, top_k) + fixed_E
        error = float(load_E.var(correction=0) / load_E.mean().square())
        if error < best_error:
            best_error, best_offset_E, best_sweep = error, offset_E, sweep
        if error < _EQUAL_ENOUGH or sweep > best_sweep + _PATIENCE:
            break
    return best_offset_E - best_offset_E.mean()


def _eligibility(score_TE: Tensor, threshold: float | None) -> tuple[Tensor, Tensor]:
    """Which experts a token may choose among, (T, E), and how many tokens have none and go to their best, (E,)."""
    if threshold is None:
        return torch.ones_like(score_TE, dtype=torch.bool), score_TE.new_zeros(score_TE.shape[1])
    eligible_TE = score_TE >= threshold
    fell_back_T = ~eligible_TE.any(1)
    fixed_E = score_TE[fell_back_T].argmax(1).bincount(minlength=score_TE.shape[1])
    return eligible_TE, fixed_E.to(score_TE.dtype)


def _sweep(open_TE: Tensor, offset_E: Tensor, top_k: int, share_E: Tensor, reach: Tensor) -> Tensor:
    """Gives each expert in turn its exact share, the others held."""
    offset_E = offset_E.clone()
    for expert, share in enumerate(share_E.round().long().tolist()):
        rivals_TE = open_TE + offset_E
        rivals_TE[:, expert] = -torch.inf
        # A token chooses the expert when its score exceeds the k-th best rival by more than −offset.
        rival_T = rivals_TE.amax(1) if top_k == 1 else rivals_TE.topk(top_k, dim=1).values[:, -1]
        margin_T = (open_TE[:, expert] - rival_T)[open_TE[:, expert] > -torch.inf]
        margin_T = margin_T.topk(min(share + 1, len(margin_T))).values  # largest first; the rest does not matter
        inside = margin_T[share - 1] if 0 < share <= len(margin_T) else margin_T.new_tensor(torch.inf)
        outside = margin_T[share] if share < len(margin_T) else margin_T.new_tensor(-torch.inf)
        # Infinite margins: rivals are too few to contest the token, so no finite offset changes its choice.
        offset_E[expert] = -(inside.clamp(-reach, reach) + outside.clamp(-reach, reach)) / 2
        offset_E -= offset_E.mean()
    return offset_E


def _load(ranking_TE: Tensor, top_k: int) -> Tensor:
    """How often each expert is among the ``top_k`` finite entries of a row."""
    value_TK, expert_TK = ranking_TE.topk(top_k, dim=1)
    return expert_TK[value_TK > -torch.inf].bincount(minlength=ranking_TE.shape[1]).to(ranking_TE.dtype)
