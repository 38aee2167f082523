"""Experts that differ from the first step: tokens are grouped, and each expert is the best small network for its group.

A token that enters a feed-forward network finds most of its hidden units idle, and which ones depends on what the token
shows. So a network fitted to one group of like tokens (`ermoe.models.fitting`) can do with fewer hidden units, or with
a lower rank, than one that has to serve all tokens.

Groups are told by the tokens that matter to the answers: in a last block these are class tokens, one of hundreds.

The router is aimed at the groups: prototype scores cos(Uᵀx, ψ_e), whose basis holds the directions that tell groups
apart, ψ_e pointing to group e, and offsets for equal load. Then tokens are grouped by the router itself, and experts
are fitted to the tokens they will really get.

Letters: T tokens, D model width, E experts, K experts per token, R rank, r routing rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ermoe.errors import UserError
from ermoe.models.calibrate import equal_load_offsets
from ermoe.models.eigen_init import keep_dense, write_expert
from ermoe.models.fitting import fitted
from ermoe.models.passes import evaluating
from ermoe.models.together import fitted_together, shares_of
from ermoe.models.tokens import TOKENS_AT_ONCE, Tokens
from ermoe.nn import EigenLinear, MixtureLayer, MoE, PrototypeScore, Routing, TopKRouter
from ermoe.nn.ffn import FFN
from ermoe.nn.scores import project

_TOKENS_TO_GROUP = 16_384
_GROUPING_ROUNDS = 10
_ROUTER_ROUNDS = 3
_HEAVY = 8  # times the mean weight of a token
_FEWEST_A_GROUP = 8
_KEPT_APART = 8  # every eighth token judges and is not fitted to
_SHARE_OF_OTHERS = 0.3  # of the weight of an expert's own tokens
_BLUR = 0.1  # of the mean variance of tokens within groups


@dataclass(frozen=True, slots=True)
class GroupFit:
    """How near a layer of fitted experts comes to its dense network, on tokens it was not fitted to.

    ``error`` is ‖ŷ − y‖ / ‖y‖, tokens and directions weighed by what they mean for the answer; ``one_expert_error`` the
    same of a single expert of that width and rank for all tokens; ``load_cv2`` the variance of the experts' loads over
    their squared mean.
    """

    error: float
    one_expert_error: float
    load_cv2: float
    num_tokens: int


@torch.no_grad()
def fill_from_groups(
    layer: MixtureLayer, ffn: FFN, tokens: Tokens, generator: torch.Generator | None = None
) -> GroupFit | None:
    """Makes the experts of ``layer`` the best versions of ``ffn`` for groups of the tokens, and aims the router.

    A shared expert that is narrower than ``ffn`` is fitted together with them. Beside one of full width, which is
    ``ffn`` itself, they add nothing yet, and there is no fit to speak of.
    """
    experts = layer.experts
    if len(tokens) < _KEPT_APART * experts.num_experts:
        raise UserError(f"calibration= has {len(tokens)} tokens for {experts.num_experts} experts: pass more images")
    tokens, choosing, judging = _parts(tokens)
    keeps_dense = layer.shared is not None and layer.shared.size[0] == ffn.hidden_dim
    width, rank = experts.size
    met = width if layer.shared is None or keeps_dense else layer.shared.size[0] + width
    one = fitted(ffn, tokens, met, rank)
    expert_TK = Groups.of(tokens, experts.num_experts, generator)(tokens.x_TD).unsqueeze(1)
    routes_by_experts = isinstance(layer.score, PrototypeScore) and layer.score.basis is None
    for _ in range(_ROUTER_ROUNDS if experts.num_experts > 1 else 0):
        if routes_by_experts:  # their bases follow from what they are fitted to
            _fit_experts(layer, ffn, tokens, expert_TK)
        _aim(layer, tokens, expert_TK[:, 0])
        expert_TK = _chosen(layer, tokens.x_TD)
    if met > width:
        _fit_beside(layer, ffn, tokens, expert_TK, choosing)
    elif not routes_by_experts:
        _fit_experts(layer, ffn, tokens, expert_TK, one, choosing, generator)
    if keeps_dense:
        keep_dense(layer, ffn)
        return None
    return _judge(layer, ffn, one, judging, len(tokens))


def _parts(tokens: Tokens) -> tuple[Tokens, Tokens, Tokens]:
    """Most of them to fit to, some to choose among fits, some to judge the choice."""
    number_T = torch.arange(len(tokens), device=tokens.x_TD.device) % (2 * _KEPT_APART)
    return tokens.where(number_T % _KEPT_APART != 0), tokens.where(number_T == 0), tokens.where(number_T == _KEPT_APART)


@dataclass(frozen=True, slots=True)
class Groups:
    """Centres of groups of tokens, (E, D), with offsets (E,) that keep the groups equally large: balanced k-means.

    >>> x = torch.cat([torch.randn(100, 3), torch.randn(100, 3) + 9])
    >>> Groups.of(Tokens(x, torch.ones(200)), 2, torch.Generator().manual_seed(0))(x).bincount().tolist()
    [100, 100]
    """

    centre_ED: Tensor
    offset_E: Tensor

    @classmethod
    def of(cls, tokens: Tokens, num_groups: int, generator: torch.Generator | None = None) -> Groups:
        """Groups of the tokens that matter, found from a sample of them."""
        x_TD = tokens.where(_which_matter(tokens, num_groups)).x_TD
        drawn = torch.randperm(len(x_TD), generator=generator)[:_TOKENS_TO_GROUP]
        sample_TD = x_TD[drawn.to(x_TD.device)].float()
        centre_ED = _spread_out(sample_TD, num_groups, generator)
        for _ in range(_GROUPING_ROUNDS):
            nearness_TE = _nearness(sample_TD, centre_ED)
            offset_E = equal_load_offsets(nearness_TE, 1)
            centre_ED = _means(sample_TD, (nearness_TE + offset_E).argmax(1), num_groups)
        return cls(centre_ED, equal_load_offsets(_nearness(sample_TD, centre_ED), 1))

    def __call__(self, x_TD: Tensor) -> Tensor:
        """The group of every token, (T,)."""
        near = (_nearness(x, self.centre_ED) + self.offset_E for x in x_TD.float().split(TOKENS_AT_ONCE))
        return torch.cat([near_TE.argmax(1) for near_TE in near])


def _spread_out(x_TD: Tensor, num_groups: int, generator: torch.Generator | None) -> Tensor:
    """Tokens far from each other, drawn with chances that grow with the squared distance (k-means++)."""
    centres = [x_TD[0]]
    distance_T = torch.full_like(x_TD[:, 0], torch.inf)
    for _ in range(num_groups - 1):
        distance_T = torch.minimum(distance_T, (x_TD - centres[-1]).square().sum(1))
        chance_T = distance_T.cpu().double().clamp_min(1e-12)
        centres.append(x_TD[int(torch.multinomial(chance_T, 1, generator=generator))])
    return torch.stack(centres)


def _nearness(x_TD: Tensor, centre_ED: Tensor) -> Tensor:
    """−‖x − c‖² / 2 up to what is the same for all centres, (T, E)."""
    return x_TD @ centre_ED.mT - centre_ED.square().sum(1) / 2


def _means(x_TD: Tensor, group_T: Tensor, num_groups: int) -> Tensor:
    """Mean token of each group, (E, D)."""
    member_TE = F.one_hot(group_T, num_groups).to(x_TD.dtype)
    return member_TE.mT @ x_TD / member_TE.sum(0).clamp_min(1).unsqueeze(1)


def _which_matter(tokens: Tokens, num_groups: int) -> Tensor:
    """Which tokens groups are told by, (T,): all, or those heavy few that outweigh all the others together.

    In a last block only class tokens reach the answer. Among all tokens they would be one group, and its expert would
    do alone what all should share. Too few of them, from a handful of images, tell no groups.
    """
    heavy_T = tokens.weight_T > _HEAVY * tokens.weight_T.mean()
    outweighs = tokens.weight_T[heavy_T].sum() > tokens.weight_T[~heavy_T].sum()
    suffices = heavy_T.sum() >= _FEWEST_A_GROUP * num_groups
    return heavy_T if bool(outweighs & suffices) else torch.ones_like(heavy_T)


def _aim(layer: MixtureLayer, tokens: Tokens, group_T: Tensor) -> None:
    """Lets the router send tokens to the experts of their groups, with equal loads."""
    router, score = layer.router, layer.score
    assert isinstance(router, TopKRouter)
    matters_T = _which_matter(tokens, layer.experts.num_experts)
    x_TD, group_T = tokens.x_TD[matters_T], group_T[matters_T]
    if isinstance(score, PrototypeScore):
        if score.basis is not None:
            score.basis.copy_(_basis_of_differences(x_TD, group_T, layer.experts.num_experts, score.basis.shape[2]))
        else:
            _put_telling_columns_first(layer, x_TD, group_T)
        score.psi.copy_(_prototypes(layer, x_TD, group_T))
    if router.balance is not None:
        drawn = tokens.x_TD[:_TOKENS_TO_GROUP]
        router.balance.offset_E.copy_(equal_load_offsets(_scores(layer, drawn), router.top_k))


def _basis_of_differences(x_TD: Tensor, group_T: Tensor, num_groups: int, route_rank: int) -> Tensor:
    """Basis (D, r) of the directions that tell groups best; those in which tokens differ, once groups do no more.

    Fisher's: v that makes vᵀBv / vᵀWv largest, B what differs between groups, W what differs within them. W is blurred,
    so that no direction counts only because hardly any token has a part in it.
    """
    x_TD, group_T = x_TD[:_TOKENS_TO_GROUP].double(), group_T[:_TOKENS_TO_GROUP]
    centre_ED = _means(x_TD, group_T, num_groups)
    between_DD = (centre_ED - centre_ED.mean(0)).mT @ (centre_ED - centre_ED.mean(0))
    within_DD = torch.cov((x_TD - centre_ED[group_T]).mT)
    within_DD.diagonal().add_(_BLUR * within_DD.diagonal().mean().clamp_min(1e-12))
    scale = 1e-6 * between_DD.trace() / within_DD.trace()
    root_DD = torch.linalg.cholesky(within_DD)
    whitened_DD = _whitened(root_DD, between_DD + scale * torch.cov(x_TD.mT))
    eigenvector = torch.linalg.eigh(whitened_DD)[1].flip(-1)[:, :route_rank]
    telling_Dr = torch.linalg.solve_triangular(root_DD.mT, eigenvector, upper=True)
    basis_Dr: Tensor = torch.linalg.qr(telling_Dr)[0]
    return basis_Dr


def _whitened(root_DD: Tensor, matrix_DD: Tensor) -> Tensor:
    """L⁻¹ M L⁻ᵀ of a lower triangle L and a symmetric M."""
    half_DD = torch.linalg.solve_triangular(root_DD, matrix_DD, upper=False)
    whole_DD: Tensor = torch.linalg.solve_triangular(root_DD, half_DD.mT, upper=False)
    return whole_DD


def _put_telling_columns_first(layer: MixtureLayer, x_TD: Tensor, group_T: Tensor) -> None:
    """Orders the columns of each expert's U, s and V by how well they tell its group from the rest (Fisher's ratio)."""
    experts = layer.experts
    entry = experts.entry
    assert isinstance(entry, EigenLinear)
    x_TD, group_T = x_TD[:_TOKENS_TO_GROUP].float(), group_T[:_TOKENS_TO_GROUP]
    for expert in range(experts.num_experts):
        inside, outside = ((x_TD[mask] @ entry.U[expert].float()) for mask in (group_T == expert, group_T != expert))
        told_R = (inside.mean(0) - outside.mean(0)).square() / (inside.var(0) + outside.var(0)).clamp_min(1e-12)
        order_R = told_R.nan_to_num(0.0).argsort(descending=True, stable=True)
        for factor in (entry.U, entry.s, entry.V):
            factor[expert] = factor[expert][..., order_R]


def _prototypes(layer: MixtureLayer, x_TD: Tensor, group_T: Tensor) -> Tensor:
    """ψ (E, r): the mean direction of an expert's own group in its basis, less that of all tokens."""
    score, num_experts = layer.score, layer.experts.num_experts
    assert score is not None
    basis_EDr = score.routing_basis(layer.experts.token_basis)
    assert basis_EDr is not None
    direction_TEr = F.normalize(project(x_TD[:_TOKENS_TO_GROUP].float(), basis_EDr), dim=-1)
    direction_TEr = direction_TEr.expand(-1, num_experts, -1)
    member_TE = F.one_hot(group_T[:_TOKENS_TO_GROUP], num_experts).to(direction_TEr.dtype)
    own_Er = torch.einsum("te,ter->er", member_TE, direction_TEr) / member_TE.sum(0).clamp_min(1).unsqueeze(1)
    return F.normalize(own_Er - direction_TEr.mean(0), dim=-1)


def _scores(layer: MixtureLayer, x_TD: Tensor) -> Tensor:
    """Scores of tokens that have no context, (T, E)."""
    score = layer.score
    assert score is not None
    basis = layer.experts.token_basis
    return torch.cat([score(x, None, basis) for x in x_TD.split(TOKENS_AT_ONCE)])


def _routed(layer: MixtureLayer, x_TD: Tensor) -> Routing:
    """What the router decides; where there is but one expert, there is nothing to score."""
    router = layer.router
    return router.choose(_scores(layer, x_TD)) if isinstance(router, TopKRouter) else layer.route(x_TD)


def _chosen(layer: MixtureLayer, x_TD: Tensor) -> Tensor:
    """The experts that the router chooses for the tokens, best first, (T, K)."""
    expert_TK = _routed(layer, x_TD).expert_TK
    assert expert_TK is not None
    return expert_TK


def _fit_experts(
    layer: MixtureLayer,
    ffn: FFN,
    tokens: Tokens,
    expert_TK: Tensor,
    one: FFN | None = None,
    choosing: Tokens | None = None,
    generator: torch.Generator | None = None,
) -> None:
    """Makes each expert the best version of ``ffn`` for the tokens that go to it, or for all if none does.

    Given ``one``, the best for all tokens, and tokens to choose by: the best there of that one, of what was fitted to
    the expert's own tokens, and of what was fitted to others too. Where few tokens matter, as the class tokens of a
    last block, a group has too few of them.
    """
    size = layer.experts.size
    goes_TK = None if choosing is None else _chosen(layer, choosing.x_TD)
    for expert in range(layer.experts.num_experts):
        own_T = (expert_TK == expert).any(1)
        own = _or_all(tokens, own_T)
        fits = [fitted(ffn, own, *size)]
        if one is not None and choosing is not None and goes_TK is not None and len(own) < len(tokens):
            mixed = own.and_some_of(tokens.where(~own_T), _SHARE_OF_OTHERS, generator)
            fits += [one, fitted(ffn, mixed, *size)]
            judge = choosing.where((goes_TK == expert).any(1)).by_cost()
            if len(judge):
                fits.sort(key=lambda network: judge.error(network, ffn))
        write_expert(layer.experts, expert, fits[0])


def _fit_beside(layer: MixtureLayer, ffn: FFN, tokens: Tokens, expert_TK: Tensor, choosing: Tokens) -> None:
    """Makes the shared expert the best version of ``ffn`` for all tokens, and the others what theirs need besides.

    Where tokens are too few for that, all experts are alike: the better of both on tokens to choose by.
    """
    experts, shared = layer.experts, layer.shared
    assert shared is not None
    own = [_or_all(tokens, (expert_TK == expert).any(1)) for expert in range(experts.num_experts)]
    fits = [fitted_together(ffn, groups, shared.size[0], experts.size[0]) for groups in (own, [tokens])]

    def write(fit: tuple[FFN, list[FFN]]) -> None:
        write_expert(shared, 0, fit[0])
        for expert in range(experts.num_experts):
            write_expert(experts, expert, fit[1][expert % len(fit[1])])

    def error(fit: tuple[FFN, list[FFN]]) -> float:
        write(fit)
        return choosing.by_cost().error(_mixture_of(layer), ffn)

    with evaluating(layer):
        write(min(fits, key=error))


def _or_all(tokens: Tokens, chosen_T: Tensor) -> Tokens:
    """The chosen tokens, or all where none is."""
    return tokens.where(chosen_T) if bool(chosen_T.any()) else tokens


@torch.no_grad()
def errors_by_groups(groups: Sequence[Tokens], errors_of: Callable[[Tokens], list[float]]) -> list[float]:
    """The mean over all tokens, by their cost, of what ``errors_of`` says of each group: a list, an error a size."""
    shares, errors = shares_of(groups, power=2), [errors_of(tokens) for tokens in groups]
    return [sum(map(operator.mul, shares, of_size)) for of_size in zip(*errors, strict=True)]


def _mixture_of(layer: MixtureLayer) -> Callable[[Tensor], Tensor]:
    """What a layer makes of tokens that have no context."""
    assert isinstance(layer, MoE)
    return lambda x_TD: layer.with_shared(layer.mix(x_TD, _routed(layer, x_TD)), x_TD, None)


def _judge(layer: MixtureLayer, ffn: FFN, one: FFN, tokens: Tokens, num_fitted_to: int) -> GroupFit:
    mixture = _mixture_of(layer)
    with evaluating(layer):
        load_E = _routed(layer, tokens.x_TD).count_E.double()
        whole, error, one_expert_error = (tokens.error(network, ffn) for network in (torch.zeros_like, mixture, one))
    return GroupFit(
        error=(error / max(whole, 1e-30)) ** 0.5,
        one_expert_error=(one_expert_error / max(whole, 1e-30)) ** 0.5,
        load_cv2=float(load_E.var(correction=0) / load_E.mean().square()),
        num_tokens=num_fitted_to,
    )
