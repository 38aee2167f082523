"""Tokens that enter the networks of a model, each with what an error there means for the model's answers.

An error Δ in the output of a network changes the answers by KL ≈ ½ E[(g·Δ)²], with g the gradient of the
log-probability of a class drawn from the model's own answer (the Fisher information). So tokens are weighed by ‖g‖: the
class token of a last block is nearly all that matters there, though it is one of hundreds. And errors are measured as
‖Δ L‖ with L² ∝ E[gᵀg]: a direction of the output that no answer depends on costs nothing.

Letters: B images, N tokens of an image, T tokens, D model width, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.models.backbones import dense_network
from ermoe.models.passes import answer, evaluating, outputs
from ermoe.nn.ffn import FFN

Networks = dict[str, tuple[nn.Module, FFN]]
"""Dense blocks and their feed-forward networks, by name."""
TOKENS_AT_ONCE = 8192  # so that hidden layers of many tokens need not be in memory together
_MAX_TOKENS = 262_144
_LEAST_WEIGHT = 0.1  # of the mean


@dataclass(slots=True)
class Tokens:
    """Tokens x (T, D) that enter a network, their weights (T,) of mean 1, and what an error there costs the answers.

    ``metric_DD`` is L, symmetric, with a mean squared eigenvalue of 1; None for plain lengths. ``cost`` is the mean of
    ‖g‖² over tokens: KL a token for an error of length √(2 D).
    """

    x_TD: Tensor
    weight_T: Tensor
    metric_DD: Tensor | None = None
    cost: float = 1.0

    def __len__(self) -> int:
        return len(self.x_TD)

    def where(self, chosen_T: Tensor) -> Tokens:
        """Some of them."""
        return replace(self, x_TD=self.x_TD[chosen_T], weight_T=self.weight_T[chosen_T])

    def and_some_of(self, others: Tokens, share: float, generator: torch.Generator | None = None) -> Tokens:
        """These and as many of the others, drawn by their weights, which weigh ``share`` of these together."""
        chance_T = others.weight_T.cpu()[: 2**24]  # as many as `multinomial` takes
        drawn_T = torch.multinomial(chance_T, len(self), replacement=True, generator=generator).to(self.x_TD.device)
        weight_T = (share * self.weight_T.mean()).expand(len(drawn_T))
        order_T = torch.randperm(2 * len(self), generator=generator).to(self.x_TD.device)
        x_TD = torch.cat([self.x_TD, others.x_TD[drawn_T]])[order_T]
        return replace(self, x_TD=x_TD, weight_T=torch.cat([self.weight_T, weight_T])[order_T])

    def by_cost(self) -> Tokens:
        """These, weighed by ‖g‖²: not to fit to, for then a few would be all, but to judge by."""
        square_T = self.weight_T.square()
        return replace(self, weight_T=square_T / square_T.mean())

    def error(self, network: Callable[[Tensor], Tensor], wanted: Callable[[Tensor], Tensor]) -> float:
        """Weighted mean of ‖(ŷ − y) L‖² over the tokens, with y what is wanted and ŷ what the network says."""
        total = 0.0
        for x_TD, weight_T in self.parts():
            apart_TD = network(x_TD) - wanted(x_TD)
            apart_TD = apart_TD if self.metric_DD is None else apart_TD @ self.metric_DD
            total += float(weight_T @ apart_TD.square().sum(1))
        return total / float(self.weight_T.sum())

    def parts(self) -> Iterator[tuple[Tensor, Tensor]]:
        """A few thousand tokens and their weights at a time."""
        return zip(self.x_TD.split(TOKENS_AT_ONCE), self.weight_T.split(TOKENS_AT_ONCE), strict=True)


class TokenSample:
    """At most ``max_tokens`` of the rows that pass by, each as likely to be kept as any other."""

    def __init__(self, max_tokens: int, seed: int) -> None:
        self._max_tokens = max_tokens
        self._generator = torch.Generator().manual_seed(seed)
        self._kept_TD: Tensor | None = None
        self._seen = 0

    def add(self, x_TD: Tensor) -> None:
        """Keeps some of the rows, in the places of others once the sample is full."""
        if self._kept_TD is None:
            self._kept_TD = x_TD.new_empty(self._max_tokens, x_TD.shape[1])
        number_T = torch.arange(self._seen, self._seen + len(x_TD))
        # Reservoir sampling: the n-th row takes a random place among n, if it is one of the sample's.
        drawn_T = (torch.rand(len(x_TD), generator=self._generator, dtype=torch.float64) * (number_T + 1)).long()
        place_T = torch.where(number_T < self._max_tokens, number_T, drawn_T)
        fits_T = place_T < self._max_tokens
        self._kept_TD[place_T[fits_T].to(x_TD.device)] = x_TD[fits_T.to(x_TD.device)]
        self._seen += len(x_TD)

    def rows(self) -> Tensor:
        """What was kept, in random order, so that the first few are a sample as well."""
        assert self._kept_TD is not None
        kept_TD = self._kept_TD[: self._seen]
        return kept_TD[torch.randperm(len(kept_TD), generator=self._generator).to(kept_TD.device)]


@torch.enable_grad()
def tokens_and_gradients(
    model: nn.Module, networks: Networks, batches: Iterable[Any]
) -> Iterator[dict[str, tuple[Tensor, Tensor]]]:
    """For every batch, the tokens that enter each network and the gradients g of what leaves it, (B, N, D) both."""
    generator = torch.Generator().manual_seed(0)
    entered: dict[str, Tensor] = {}
    left: dict[str, Tensor] = {}

    def enters(name: str) -> Any:
        return lambda norm, args, z: entered.update({name: z.detach()})

    def leaves(name: str) -> Any:
        def hook(network: nn.Module, args: object, y: Tensor) -> Tensor:
            left[name] = y if y.requires_grad else y.detach().requires_grad_()
            return left[name]

        return hook

    learns = {parameter: parameter.requires_grad for parameter in model.parameters()}
    with evaluating(model), ExitStack() as hooks:
        for parameter in learns:  # gradients are wanted of what networks say, and of nothing else
            hooks.callback(parameter.requires_grad_, learns[parameter])
            parameter.requires_grad_(False)
        for name, (block, ffn) in networks.items():
            hooks.callback(ffn.norm.register_forward_hook(enters(name)).remove)
            hooks.callback(dense_network(block).register_forward_hook(leaves(name)).remove)
        for output in outputs(model, batches):
            # What a network says may reach no answer, as behind the last stage that a feature pyramid takes.
            gradients = torch.autograd.grad(
                _log_probability(answer(output), generator),
                list(left.values()),
                allow_unused=True,
                materialize_grads=True,
            )
            yield {name: (entered[name], g_BND.float()) for name, g_BND in zip(left, gradients, strict=True)}


def sample_tokens(
    model: nn.Module, networks: Networks, batches: Iterable[Any], *, max_tokens: int = _MAX_TOKENS
) -> dict[str, Tokens]:
    """Tokens that enter each of the networks while the model runs over ``batches``; memory does not grow with them."""
    samples = {name: TokenSample(max_tokens, seed=0) for name in networks}
    fisher: dict[str, Tensor] = {}
    for passed in tokens_and_gradients(model, networks, batches):
        for name, (x_BND, g_BND) in passed.items():
            x_TD, g_TD = x_BND.flatten(0, -2).float(), g_BND.flatten(0, -2)
            samples[name].add(torch.cat([x_TD, g_TD.square().sum(1, keepdim=True)], 1))
            fisher[name] = fisher.get(name, 0) + g_TD.mT @ g_TD
    return {name: _weighed(sample.rows(), metric_of(fisher[name])) for name, sample in samples.items()}


def _log_probability(answer_BC: Tensor, generator: torch.Generator) -> Tensor:
    """Σ over images of log p(c), with the class c drawn from p, the answer itself."""
    answer_BC = answer_BC.float().flatten(0, -2).log_softmax(-1)
    drawn_B = torch.multinomial(answer_BC.detach().exp().cpu(), 1, generator=generator).to(answer_BC.device)
    log_probability: Tensor = answer_BC.gather(1, drawn_B).sum()
    return log_probability


def _weighed(row_TD: Tensor, metric_DD: Tensor) -> Tokens:
    cost_T = row_TD[:, -1]
    return Tokens(row_TD[:, :-1], weights_of(cost_T), metric_DD, float(cost_T.mean()))


def metric_of(fisher_DD: Tensor) -> Tensor:
    """L with L² = E[gᵀg] over its mean eigenvalue, and a little of the unit matrix, for all that a sample misses."""
    eigenvalue_D, eigenvector_DD = torch.linalg.eigh(fisher_DD.double())
    eigenvalue_D = eigenvalue_D.clamp_min(0)
    eigenvalue_D = eigenvalue_D + _LEAST_WEIGHT * eigenvalue_D.mean() + 1e-30
    root_D = (eigenvalue_D / eigenvalue_D.mean()).sqrt()
    metric_DD: Tensor = (eigenvector_DD * root_D) @ eigenvector_DD.mT
    return metric_DD.to(fisher_DD.dtype)


def weights_of(cost: Tensor) -> Tensor:
    """‖g‖ over its mean, and not its square: a few tokens would leave too little to fit to; none weighs nothing."""
    length = cost.sqrt()
    length = length + _LEAST_WEIGHT * length.mean() + 1e-30
    return length / length.mean()
