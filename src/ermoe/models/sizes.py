"""How small the feed-forward networks of a model may become within a budget of operations: error per operation.

What a size does to the answers is estimated for all sizes at once, in closed form and to second order, as if the
errors of tokens had nothing to do with each other. They have: tokens of an image err alike, and the estimate is off by
a factor of its own in each block, 0.3 to 3 in DeiT-Tiny. So at two sizes a block is run with experts of that size on
images kept apart, and the KL(dense ‖ cut) of the answers there sets the level of the estimate.

Sizes then shrink step by step, always where the answers change least for an operation saved, until the whole model is
within its budget. Routing takes time beyond its operations, so experts have to be worth that too: a block that they
help little gets one network for all its tokens, and so does one whose tokens are better served by it, such as a last
one in which only class tokens count.

Letters: T tokens, D model width, B images, C classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.backbones import SparseBlock, dense_network, family_of
from ermoe.models.clusters import Groups, errors_by_groups
from ermoe.models.count import count
from ermoe.models.fitting import errors_of_ranks, errors_of_widths, fitted
from ermoe.models.passes import answer, evaluating, outputs, tensors_of
from ermoe.models.together import errors_together, fitted_together
from ermoe.models.tokens import Networks, Tokens, sample_tokens
from ermoe.nn.ffn import FFN

_STEPS = 16  # sizes are multiples of a sixteenth of the dense one
_MEASURED_AT = (6, 12)
_TOKENS_TO_CHOOSE = 65_536
_KEPT_APART = 5  # every fifth batch, until there are images enough
_IMAGES_TO_MEASURE = 200


@dataclass(frozen=True, slots=True)
class Size:
    """Of the networks of one block: how many experts there are, and the hidden width, or the rank, that a token meets.

    ``shared`` of it is that of a network for all tokens; the rest is the expert's own.
    """

    num_experts: int
    kept: int
    shared: int = 0

    @property
    def own(self) -> int:
        """What an expert has to itself."""
        return self.kept - self.shared

    def entries(self, ffn: FFN, *, is_rank: bool) -> int:
        """Entries of the matrices that a token meets, the router's among them: each is two operations."""
        each = self.kept * (ffn.dim + ffn.hidden_dim if is_rank else ffn.dim)
        columns = max(8, self.num_experts) + self.num_experts  # of a shared basis, and ψ in it
        routing = columns * ffn.dim if self.num_experts > 1 else 0
        return len(ffn.linears()) * each + routing


@dataclass(frozen=True, slots=True)
class Kind:
    """What networks are cut to: a number of experts, of less "width" or "rank".

    ``routed`` is the share of the dense width that experts have to themselves; what else is kept, all tokens share.
    ``routing_cost`` is what a router has to save beyond its operations, over those of the dense network.
    """

    num_experts: int
    cut: str = "width"
    routed: float = 1.0
    routing_cost: float = 0.1

    def size(self, ffn: FFN, kept: int) -> Size:
        """The experts of which a token meets ``kept`` hidden units, or as high a rank."""
        own = max(1, round(self.routed * ffn.hidden_dim)) if self.cut == "width" else kept
        return Size(self.num_experts, kept, shared=max(kept - own, 0) if self.num_experts > 1 else 0)


def entries_of(ffn: FFN) -> int:
    """Entries of the matrices of a dense network."""
    return len(ffn.linears()) * ffn.dim * ffn.hidden_dim


def choose_sizes(model: nn.Module, calibration: Iterable[Any], budget: float, kind: Kind) -> dict[int, Size]:
    """The size of the experts of each block that gets some, by its index; the other blocks stay dense."""
    family = family_of(model)
    blocks = family.blocks(model)
    if any(isinstance(block, SparseBlock) for _, block in blocks):
        raise UserError("this model is sparse already: slim the dense one")
    networks: Networks = {name: (block, family.ffn(block)) for name, block in blocks}
    if kind.cut == "width" and any(ffn.inner_norm is not None for _, ffn in networks.values()):
        raise UserError(
            "the networks of this model normalise their hidden layers, which fewer units change: cut='rank'"
        )
    apart: list[Any] = []
    tokens = sample_tokens(model, networks, _kept_apart(calibration, apart), max_tokens=_TOKENS_TO_CHOOSE)
    answers = _Answers(model, apart)
    harm = {name: _harm(answers, block, ffn, tokens.pop(name), kind) for name, (block, ffn) in networks.items()}
    to_save = (1 - budget) * count(model).multiply_adds.total / family.num_tokens(model)
    chosen = _shrink({name: ffn for name, (_, ffn) in networks.items()}, harm, to_save, kind)
    return {index: size for index, (name, _) in enumerate(blocks) if (size := chosen[name]) is not None}


def _kept_apart(batches: Iterable[Any], apart: list[Any]) -> Iterator[Any]:
    """The batches but for some, which go to ``apart``. Where there are too few to spare one, the first is in both."""
    first: list[Any] = []
    for number, batch in enumerate(batches):
        first = first or [batch]
        num_apart = sum(len(tensors_of(each)[0]) for each in apart)
        if number % _KEPT_APART == _KEPT_APART - 1 and num_apart < _IMAGES_TO_MEASURE:
            apart.append(batch)
        else:
            yield batch
    if not apart:
        apart += first


class _Answers:
    """What a model says to some batches, and how far it is from that with another network in one of its blocks."""

    def __init__(self, model: nn.Module, batches: list[Any]) -> None:
        self._model, self._batches = model, batches
        self._wanted_BC = self._log_probability()
        if self._wanted_BC.shape[1] == 1:
            raise UserError(
                "the model has a single output, and sizes are chosen by what they do to probabilities of classes: "
                "choose them yourself, with ermoe.upcycle(init='clusters', hidden_dim=…)"
            )

    def divergence(self, block: nn.Module, ffn: FFN, network: Callable[[Tensor], Tensor]) -> float:
        """Mean over images of KL(dense ‖ model) when ``network`` stands for the block's ``ffn``."""
        entered: list[Tensor] = []

        def enters(norm: nn.Module, args: object, x: Tensor) -> None:
            entered[:] = [x]

        def leaves(module: nn.Module, args: object, y: Tensor) -> Tensor:
            x_TD = entered[0].flatten(0, -2)
            return network(x_TD).view_as(y).to(y.dtype)

        with ExitStack() as hooks:
            hooks.callback(ffn.norm.register_forward_hook(enters).remove)
            hooks.callback(dense_network(block).register_forward_hook(leaves).remove)
            found_BC = self._log_probability()
        divergence_B = (self._wanted_BC.exp() * (self._wanted_BC - found_BC)).sum(1)
        return float(divergence_B.mean().clamp_min(0))

    @torch.no_grad()
    def _log_probability(self) -> Tensor:
        with evaluating(self._model):
            said = [answer(output).float().flatten(0, -2) for output in outputs(self._model, self._batches)]
        return torch.cat(said).double().log_softmax(-1)


@torch.no_grad()
def _harm(answers: _Answers, block: nn.Module, ffn: FFN, tokens: Tokens, kind: Kind) -> dict[Size, float]:
    """What the answers suffer from experts of each size that may be chosen: the estimate, at the measured level."""
    estimates = _estimates(ffn, tokens, kind)
    measured = {}
    for size in {kind.size(ffn, _steps(ffn, kind.cut)[step - 1]) for step in _MEASURED_AT}:
        mixture = _mixture(ffn, tokens, size, kind.cut)
        measured[size.kept] = answers.divergence(block, ffn, mixture) / max(estimates[size], 1e-30)
    return {size: estimate * _between(measured, size.kept) for size, estimate in estimates.items()}


def _between(factors: dict[int, float], kept: int) -> float:
    """A factor for a size, on a straight line of logarithms between the two that are known; theirs beyond them."""
    (low, first), (high, last) = min(factors.items()), max(factors.items())
    place = min(max((kept - low) / max(high - low, 1), 0.0), 1.0)
    return math.exp((1 - place) * math.log(first + 1e-12) + place * math.log(last + 1e-12))


def _steps(ffn: FFN, cut: str) -> list[int]:
    """Sizes that may be chosen, smallest first."""
    whole = ffn.hidden_dim if cut == "width" else min(ffn.dim, ffn.hidden_dim)
    return [max(1, whole * step // _STEPS) for step in range(1, _STEPS)]


def _estimates(ffn: FFN, tokens: Tokens, kind: Kind) -> dict[Size, float]:
    """What the answers suffer, to second order, if the errors of tokens are independent."""
    kept = sorted(set(_steps(ffn, kind.cut)))
    errors_of = errors_of_widths if kind.cut == "width" else errors_of_ranks
    alone = dict(zip(kept, errors_of(ffn, tokens, kept), strict=True))
    estimates = {Size(1, each): tokens.cost * error for each, error in alone.items()}
    if kind.num_experts > 1:  # an expert may also be the one for all, where that is better
        groups = [own for own in _grouped(tokens, kind.num_experts)[1] if len(own) > 1]
        sizes = [kind.size(ffn, each) for each in kept]
        routed, split = [s for s in sizes if not s.shared], [s for s in sizes if s.shared]
        errors = errors_by_groups(groups, lambda own: errors_of(ffn, own, [s.kept for s in routed])) if routed else []
        errors += errors_together(ffn, groups, [(s.shared, s.own) for s in split]) if split else []
        for size, error in zip([*routed, *split], errors, strict=True):
            estimates[size] = tokens.cost * min(error, alone[size.kept])
    return estimates


def _grouped(tokens: Tokens, num_groups: int) -> tuple[Groups, list[Tokens]]:
    groups = Groups.of(tokens, num_groups, torch.Generator().manual_seed(0))
    group_T = groups(tokens.x_TD)
    return groups, [tokens.where(group_T == number) for number in range(num_groups)]


def _mixture(ffn: FFN, tokens: Tokens, size: Size, cut: str) -> Callable[[Tensor], Tensor]:
    """Experts of that size, fitted to groups of the tokens, as one network."""
    groups, own = _grouped(tokens, size.num_experts)
    own = [each if len(each) > 1 else tokens for each in own]
    shared: Callable[[Tensor], Tensor] | None = None
    if size.shared:
        shared, experts = fitted_together(ffn, own, size.shared, size.own)
    else:
        widths = (size.kept, None) if cut == "width" else (ffn.hidden_dim, size.kept)
        experts = [fitted(ffn, each, *widths) for each in own]

    def mixture(x_TD: Tensor) -> Tensor:
        group_T = groups(x_TD)
        y_TD = torch.empty_like(x_TD)
        for number, expert in enumerate(experts):
            own_T = group_T == number
            y_TD[own_T] = expert(x_TD[own_T]).to(y_TD.dtype)
        return y_TD if shared is None else y_TD + shared(x_TD)

    return mixture


def _shrink(
    networks: dict[str, FFN], harm: dict[str, dict[Size, float]], to_save: float, kind: Kind
) -> dict[str, Size | None]:
    """The size of each network, None for one that stays, such that at least ``to_save`` entries a token are saved."""

    def saved(name: str, size: Size | None) -> int:
        if size is None:
            return 0
        return entries_of(networks[name]) - size.entries(networks[name], is_rank=kind.cut == "rank")

    def sooner(name: str, size: Size | None) -> float:
        is_routed = size is not None and size.num_experts > 1
        return saved(name, size) - kind.routing_cost * entries_of(networks[name]) * is_routed

    def suffered(name: str, size: Size | None) -> float:
        return 0.0 if size is None else harm[name][size]

    chosen: dict[str, Size | None] = dict.fromkeys(networks)
    while sum(saved(name, size) for name, size in chosen.items()) < to_save:
        # One step or several: the first step of a dense network also pays for its router.
        ways = [
            ((suffered(name, size) - suffered(name, now)) / (sooner(name, size) - sooner(name, now)), name, size)
            for name, now in chosen.items()
            for size in harm[name]
            if saved(name, size) > saved(name, now) and sooner(name, size) > sooner(name, now)
        ]
        if not ways:
            raise UserError(
                "the budget is below what the model takes with the smallest feed-forward networks: use a larger one"
            )
        _, name, size = min(ways, key=lambda way: way[:2])
        chosen[name] = size
    return chosen
