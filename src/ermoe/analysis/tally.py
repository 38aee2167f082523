"""Running totals of what one layer did, in tensors whose size does not depend on how many tokens it has seen.

Adding a batch is a handful of tensor operations on the layer's own device: no host sync, no shape that depends on
data, nothing that ``torch.compile(fullgraph=True)`` would stumble over.

Letters: T tokens, E experts, A pairs of token and expert, C classes, B bins, P tokens of the probe, G labels.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from ermoe.analysis import measures
from ermoe.nn import Routing
from ermoe.nn.precision import widest

NUM_BINS = 200
"""Bins of width 0.01 on [−1, 1]: thresholds of two digits are edges. The outer bins also hold what lies beyond."""


@dataclass(slots=True)
class Totals:
    """Everything about a layer that may be summed: over batches, and over processes.

    Sums come with their own denominators (``num_judged``, ``num_scored``, ``num_above``), so that a notion the router
    does not have ends as 0 / 0 = NaN. The last row of ``count_CE`` and ``weight_CE`` is of tokens without a label.
    """

    num_tokens: Tensor  # real ones; padding counts nowhere
    num_unserved: Tensor
    num_dropped: Tensor
    num_near_zero: Tensor
    num_judged: Tensor
    num_fell_back: Tensor
    num_scored: Tensor
    num_above: Tensor
    margin_sum: Tensor
    spread_sum: Tensor
    tail_sum_E: Tensor  # column k − 1: of k experts a token
    count_E: Tensor
    weight_E: Tensor
    score_B: Tensor
    best_score_B: Tensor
    count_CE: Tensor
    weight_CE: Tensor

    @classmethod
    def zeros(cls, num_experts: int, num_classes: int, device: torch.device) -> Totals:
        """Nothing seen yet: shapes are the letters of the names, and what is neither a sum nor a weight is counted."""
        size = {"C": num_classes + 1, "E": num_experts, "B": NUM_BINS}
        zeros = {}
        for name in (field.name for field in fields(cls)):
            letters = name.rpartition("_")[2]
            shape = [size[letter] for letter in letters] if letters.isupper() else []
            dtype = widest(device) if "_sum" in name or name.startswith("weight") else torch.long
            zeros[name] = torch.zeros(shape, dtype=dtype, device=device)
        return cls(**zeros)

    def cpu(self) -> Totals:
        """A copy on the host; this is where the device is waited for."""
        return Totals(*(tensor.cpu() for tensor in self.tensors()))

    def tensors(self) -> list[Tensor]:
        """All of them, always in the same order."""
        return [getattr(self, field.name) for field in fields(self)]


@dataclass(slots=True, frozen=True)
class _Pairs:
    """A routing's pairs; those not in ``kept_A`` are there to keep the shapes of a traced graph fixed."""

    token_A: Tensor
    expert_A: Tensor
    weight_A: Tensor
    kept_A: Tensor

    @classmethod
    def of(cls, routing: Routing) -> _Pairs:
        weight_A = routing.weight_A.detach()
        if not torch.compiler.is_compiling():
            kept_A = torch.ones_like(weight_A, dtype=torch.bool)
        elif routing.expert_TK is None:
            kept_A = weight_A != 0
        elif routing.kept_TK is None:
            kept_A = torch.ones_like(weight_A, dtype=torch.bool)
        else:
            kept_A = routing.kept_TK.reshape(-1)
        return cls(routing.token_A, routing.expert_A, weight_A, kept_A)

    def used(self, num_tokens: int, num_experts: int) -> Tensor:
        """Which token uses which expert, boolean (T, E)."""
        flat = self.token_A.new_zeros(num_tokens * num_experts)
        index_A = self.token_A * num_experts + self.expert_A
        return flat.scatter_add(0, index_A, self.kept_A.long()).view(num_tokens, num_experts) > 0


class Tally:
    """An observer of one layer: put `add` on its ``observers`` and read ``totals`` afterwards.

    ``label_G``, set before a forward pass, holds the classes of its tokens: one per token, or one per group of
    consecutive tokens (an image). It serves one pass. The experts of the first ``probe_tokens`` tokens are kept, so
    that two recordings of the same inputs can be compared token by token.

    >>> tally = Tally(num_experts=3)
    >>> tally.add(Routing.from_choice(torch.tensor([[0, 2]]), torch.tensor([[0.75, 0.25]]), num_experts=3))
    >>> tally.totals.count_E.tolist(), tally.totals.weight_E.tolist()
    ([1, 0, 1], [0.75, 0.0, 0.25])
    """

    def __init__(
        self,
        num_experts: int,
        *,
        top_k: int | None = None,
        threshold: float | None = None,
        num_classes: int = 0,
        probe_tokens: int = 0,
        device: torch.device | None = None,
    ) -> None:
        device = torch.device("cpu") if device is None else device
        self.num_experts = num_experts
        self.top_k = top_k
        self.threshold = threshold
        self.num_classes = num_classes
        self.probe_tokens = probe_tokens
        self.label_G: Tensor | None = None
        with torch.inference_mode(False):  # an inference tensor could not be added to outside of inference mode
            self.totals = Totals.zeros(num_experts, num_classes, device)
            self.num_shown = torch.zeros((), dtype=torch.long, device=device)
            # One row more than there are tokens to keep: it takes all the others.
            self._probe_PE = torch.zeros(probe_tokens + 1, num_experts, dtype=torch.bool, device=device)
            self._edge_B = torch.linspace(-1, 1, NUM_BINS + 1, device=device)[1:-1]

    @torch.no_grad()
    def add(self, routing: Routing) -> None:
        """Adds what one forward pass did."""
        pairs = _Pairs.of(routing)
        used_TE = pairs.used(routing.num_tokens, self.num_experts)
        real_T = torch.ones_like(used_TE[:, 0]) if routing.mask_T is None else routing.mask_T
        self._add_load(routing, pairs, real_T & ~used_TE.any(-1), real_T)
        if routing.fell_back_T is not None:
            self.totals.num_judged += real_T.sum()
            self.totals.num_fell_back += (routing.fell_back_T & real_T).sum()
        if routing.score_TE is not None:
            self._add_scores(routing.score_TE.detach().float(), real_T)
        if self.num_classes:
            self._add_classes(routing, pairs)
        self._add_probe(used_TE)

    def _add_load(self, routing: Routing, pairs: _Pairs, unserved_T: Tensor, real_T: Tensor) -> None:
        totals = self.totals
        totals.num_tokens += real_T.sum()
        totals.num_unserved += unserved_T.sum()
        totals.num_near_zero += (measures.near_zero(pairs.weight_A) & pairs.kept_A).sum()
        totals.count_E += routing.count_E
        totals.weight_E.scatter_add_(0, pairs.expert_A, (pairs.weight_A * pairs.kept_A).to(totals.weight_E.dtype))
        if routing.num_dropped is not None:
            totals.num_dropped += routing.num_dropped

    def _add_scores(self, score_TE: Tensor, real_T: Tensor) -> None:
        totals = self.totals
        totals.num_scored += real_T.sum()
        totals.margin_sum += _sum(measures.margin(score_TE), real_T)
        totals.spread_sum += _sum(measures.spread(score_TE), real_T)
        self._add_histogram(totals.score_B, score_TE, real_T.unsqueeze(1).expand_as(score_TE))
        self._add_histogram(totals.best_score_B, score_TE.amax(-1), real_T)
        if self.threshold is not None and self.top_k is not None:
            tail_TE = measures.tail_masses(score_TE, self.threshold)
            has_tail_T = real_T & ~tail_TE[:, 0].isnan()
            totals.num_above += has_tail_T.sum()
            totals.tail_sum_E += torch.where(has_tail_T.unsqueeze(1), tail_TE, 0).sum(0, dtype=totals.tail_sum_E.dtype)

    def _add_histogram(self, histogram_B: Tensor, score: Tensor, real: Tensor) -> None:
        bin_ = torch.bucketize(score, self._edge_B, right=True)  # edge[b − 1] <= score < edge[b]
        histogram_B.scatter_add_(0, bin_.reshape(-1), real.reshape(-1).long())

    def _add_classes(self, routing: Routing, pairs: _Pairs) -> None:
        label_A = torch.full_like(pairs.token_A, self.num_classes)
        if self.label_G is not None:
            label_A = self._label_of_tokens(self.label_G, routing.num_tokens)[pairs.token_A]
            self.label_G = None
        index_A = label_A * self.num_experts + pairs.expert_A
        self.totals.count_CE.view(-1).scatter_add_(0, index_A, pairs.kept_A.long())
        weight_CE = self.totals.weight_CE
        weight_CE.view(-1).scatter_add_(0, index_A, (pairs.weight_A * pairs.kept_A).to(weight_CE.dtype))

    def _label_of_tokens(self, label_G: Tensor, num_tokens: int) -> Tensor:
        if len(label_G) == 0 or num_tokens % len(label_G):
            raise ValueError(
                f"{len(label_G)} labels cannot be shared out over {num_tokens} tokens: give one label for each image "
                "of the batch, or one for each token"
            )
        known_G = (label_G >= 0) & (label_G < self.num_classes)
        label_G = torch.where(known_G, label_G, self.num_classes)
        return label_G.unsqueeze(1).expand(-1, num_tokens // len(label_G)).reshape(-1)

    def _add_probe(self, used_TE: Tensor) -> None:
        first_TE = used_TE[: self.probe_tokens]
        row_T = self.num_shown + torch.arange(len(first_TE), device=first_TE.device)
        self._probe_PE.index_copy_(0, row_T.clamp_max(self.probe_tokens), first_TE)
        self.num_shown += len(used_TE)

    def has_scores(self) -> bool:
        """Whether the router scores tokens at all."""
        return bool(self.totals.num_scored)

    def probe(self) -> Tensor:
        """Which of the first tokens used which expert, boolean (P, E); P is at most ``probe_tokens``."""
        return self._probe_PE[: min(int(self.num_shown), self.probe_tokens)]

    def tail_mass(self, top_k: int) -> float:
        """The tail mass that another number of experts a token would leave, at the router's own threshold."""
        return float(self.totals.tail_sum_E[min(top_k, self.num_experts) - 1] / self.totals.num_above)

    def fallback_rate(self, threshold: float) -> float:
        """The fallback rate another threshold would give, from the histogram: exact at its edges, 0, ±0.01, …"""
        num_below = int((self._edge_B.cpu() <= threshold + 1e-6).sum()) + (threshold >= 1)
        best_score_B = self.totals.best_score_B.cpu().double()
        return float(best_score_B[:num_below].sum() / best_score_B.sum())


def _sum(value_T: Tensor, real_T: Tensor) -> Tensor:
    return torch.where(real_T, value_T, 0).sum(dtype=widest(value_T.device))  # float32 stops growing at 2²⁴
