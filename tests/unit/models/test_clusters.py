"""Experts fitted to groups of tokens: what they equal, what they save, and how they are routed."""

import copy

import pytest
import timm
import torch

import ermoe
from ermoe.errors import UserError
from ermoe.models import clusters, fitting
from ermoe.models import tokens as tokens_module
from ermoe.models.backbones import family_of
from ermoe.models.together import errors_together, fitted_together
from ermoe.models.tokens import Tokens, TokenSample, sample_tokens
from ermoe.nn import moe_layers
from ermoe.nn.basis import orthonormality_error
from ermoe.nn.ffn import FFN, Linear


def linear(generator, rows, columns, bias=True):
    weight = torch.randn(rows, columns, generator=generator) / rows**0.5
    return Linear(weight, torch.randn(columns, generator=generator) / 4 if bias else None)


def network(*, gated=False, bias=True, dim=12, hidden=32):
    generator = torch.Generator().manual_seed(0)
    gate = linear(generator, dim, hidden, bias) if gated else None
    up, down = linear(generator, dim, hidden, bias), linear(generator, hidden, dim, bias)
    return FFN(up, down, torch.nn.GELU(), torch.nn.Identity(), gate=gate)


def two_kinds(num=2000, dim=12):
    """Tokens around two centres, which switch different hidden units on."""
    generator = torch.Generator().manual_seed(1)
    centre = 3 * torch.randn(2, dim, generator=generator)
    kind = torch.arange(num) % 2
    return centre[kind] + 0.5 * torch.randn(num, dim, generator=generator), kind


def alike(x):
    """Tokens that all weigh the same."""
    return Tokens(x, torch.ones(len(x)))


def error(found, ffn, x):
    return float((found(x) - ffn(x)).norm() / ffn(x).norm())


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    return timm.create_model("test_vit").eval()


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(8, 3, 160, 160, generator=generator) for _ in range(3)]


def convert(dense, batches, **options):
    options = {"num_experts": 3, "top_k": 1, "blocks": [2, 5], **options}
    generator = torch.Generator().manual_seed(0)
    return ermoe.upcycle(dense, init="clusters", calibration=batches, generator=generator, **options)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_full_width_and_rank_give_the_network_itself(gated, bias):
    ffn = network(gated=gated, bias=bias)
    assert fitting.fitted(ffn, alike(two_kinds()[0]), 32, 12) is ffn


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("size", [(16, None), (32, 6), (20, 8)])
def test_a_network_fitted_to_one_kind_of_token_is_nearer_than_one_for_all(gated, bias, size):
    ffn = network(gated=gated, bias=bias)
    x, kind = two_kinds()
    own = x[kind == 0]
    assert error(fitting.fitted(ffn, alike(own), *size), ffn, own) < error(
        fitting.fitted(ffn, alike(x), *size), ffn, own
    )


def test_fitted_weights_have_the_rank_and_width_that_were_asked_for():
    fitted = fitting.fitted(network(), alike(two_kinds()[0]), 20, 5)
    assert fitted.up.W.shape == (12, 20)
    assert [int(torch.linalg.matrix_rank(part.W, rtol=1e-5)) for part in (fitted.up, fitted.down)] == [5, 5]


def test_the_mean_output_of_a_group_is_kept():
    ffn, x = network(), two_kinds()[0]
    fitted = fitting.fitted(ffn, alike(x), 10, 4)
    torch.testing.assert_close(fitted(x).mean(0), ffn(x).mean(0), atol=1e-5, rtol=1e-4)


def test_the_last_map_is_the_least_squares_one():
    """Beside the slow twin: a ridge regression towards the dense weight, by stacking equations."""
    ffn, x = network(), two_kinds()[0].double()
    ffn = FFN(*(Linear(part.W.double(), part.b.double()) for part in (ffn.up, ffn.down)), ffn.act, ffn.norm)
    fitted = fitting.fitted(ffn, alike(x), 16)
    units = [int((ffn.up.W - column.unsqueeze(1)).abs().sum(0).argmin()) for column in fitted.up.W.mT]
    hidden = ffn.hidden(x)[:, units]
    a, y = hidden - hidden.mean(0), ffn(x) - ffn(x).mean(0)
    share = 1e-3 * (1 + 10 * 16 / len(x))
    ridge = (share * a.square().mean(0).mean() * len(x)).sqrt() * torch.eye(16).double()
    wanted = torch.linalg.lstsq(torch.cat([a, ridge]), torch.cat([y, ridge @ ffn.down.W[units]])).solution
    torch.testing.assert_close(fitted.down.W, wanted, atol=1e-6, rtol=1e-6)


def test_moments_are_those_of_all_rows_at_once():
    x, weight = torch.randn(100, 5) + 1, torch.rand(100)
    moments = fitting.Moments.over(zip(x.split(33), weight.split(33), strict=True))
    torch.testing.assert_close(moments.mean, (x * weight[:, None]).sum(0).double() / weight.double().sum())
    wanted = torch.cov(x.double().T, correction=0, aweights=weight.double())
    torch.testing.assert_close(moments.covariance(centred=True), wanted, atol=1e-5, rtol=1e-5)
    about_zero = (x.T * weight @ x).double() / weight.double().sum()
    torch.testing.assert_close(moments.covariance(centred=False), about_zero, atol=1e-5, rtol=1e-5)


def test_no_entering_weight_of_that_rank_is_better():
    """Eckart–Young on the pre-activations themselves, in the metric M = E[a′ᵀa′] ∘ W2 W2ᵀ."""
    ffn = network()
    x = torch.randn(400, 12, generator=torch.Generator().manual_seed(3)) * torch.linspace(0.1, 2, 12) + 0.5
    weight = torch.rand(400, generator=torch.Generator().manual_seed(4)) + 0.5
    cut = fitting._cut(ffn, Tokens(x, weight), 4)
    pre = ffn.up(x).requires_grad_()
    (slope,) = torch.autograd.grad(ffn.act(pre).sum(), pre)
    second = torch.einsum("t,tj,tk->jk", weight / weight.sum(), slope, slope).double()
    root = torch.linalg.cholesky(second * (ffn.down.W @ ffn.down.W.mT).double() + 1e-12 * torch.eye(len(second)))
    mean = (x * weight.unsqueeze(1)).sum(0) / weight.sum()
    centred = ((x - mean) * weight.sqrt().unsqueeze(1)).double()
    error = (centred @ (ffn.up.W.double() - cut.up.W.double()) @ root).norm()
    best = torch.linalg.svdvals(centred @ ffn.up.W.double() @ root)[4:].norm()
    assert float(error) == pytest.approx(float(best), rel=0.01)
    means = ((network(x) * weight.unsqueeze(1)).sum(0) / weight.sum() for network in (cut.up, ffn.up))
    torch.testing.assert_close(*means, atol=1e-4, rtol=1e-4)  # the bias takes it up


def test_errors_of_widths_are_those_of_fitted_networks():
    ffn, x = network(), two_kinds(20_000)[0]
    x = x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]
    (found,) = fitting.errors_of_widths(ffn, alike(x), [16])
    wanted = float((fitting.fitted(ffn, alike(x), 16)(x) - ffn(x)).square().sum(1).mean())
    assert found == pytest.approx(wanted, rel=0.05)


def test_groups_are_equally_large_and_like_goes_with_like():
    x, kind = two_kinds()
    group = clusters.Groups.of(alike(x), 2, torch.Generator().manual_seed(0))(x)
    assert group.bincount().tolist() == [1000, 1000]
    assert float((group == kind).float().mean()) in (0.0, 1.0)


def few_that_matter(num=4000, dim=12):
    """Tokens of which 40, of two kinds of their own, weigh more than all others together."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num, dim, generator=generator)
    number = torch.randperm(num, generator=generator)
    few, kind = number < num // 100, number % 2
    x[few] = 6 + 3 * torch.eye(dim)[kind[few]] + 0.1 * x[few]
    return Tokens(x, torch.where(few, 500.0, 1.0)), few, kind


def test_groups_are_told_by_the_few_tokens_that_matter():
    tokens, few, kind = few_that_matter()
    group = clusters.Groups.of(tokens, 2, torch.Generator().manual_seed(0))(tokens.x_TD)
    assert float((group == kind)[few].float().mean()) in (0.0, 1.0)
    unweighed = clusters.Groups.of(alike(tokens.x_TD), 2, torch.Generator().manual_seed(0))(tokens.x_TD)
    assert len(unweighed[few].unique()) == 1  # all tokens equal, these go together


@pytest.mark.parametrize("num_heavy", [1, 3, 15])
def test_a_handful_of_heavy_tokens_tells_no_groups(num_heavy):
    x = torch.randn(800, 12, generator=torch.Generator().manual_seed(0))
    tokens = Tokens(x, torch.where(torch.arange(800) < num_heavy, 1e4, 1.0))
    routing = {"score": "prototype", "routing_basis": "shared", "route_rank": 4, "balance": "offset"}
    layer = ermoe.nn.EigenMoE(12, 32, num_experts=2, rank=4, top_k=1, **routing)
    fit = clusters.fill_from_groups(layer, network(), tokens, torch.Generator().manual_seed(0))
    assert fit.load_cv2 < 0.05
    group = clusters.Groups.of(tokens, 2, torch.Generator().manual_seed(0))(x)
    assert group.bincount(minlength=2).tolist() == [400, 400]


def test_routing_looks_where_groups_are_told_apart_and_not_where_all_tokens_vary():
    generator = torch.Generator().manual_seed(3)
    x, kind = torch.randn(4000, 12, generator=generator), torch.arange(4000) % 2
    loud, telling = 0, 1
    x[:, loud] = 20 * x[:, loud] + 4 * kind
    x[:, telling] = 0.5 * x[:, telling] + 3 * kind
    basis = clusters._basis_of_differences(x, kind, 2, 4).float()
    assert basis.shape == (12, 4)
    assert orthonormality_error(basis) < 1e-5
    assert basis[telling, 0].abs() > 0.95
    assert basis[loud, 0].abs() < 0.1


def test_experts_share_out_the_tokens_that_matter_and_have_equal_loads():
    tokens, few, kind = few_that_matter()
    routing = {"score": "prototype", "routing_basis": "shared", "route_rank": 4, "balance": "offset"}
    layer = ermoe.nn.EigenMoE(12, 32, num_experts=2, rank=4, top_k=1, **routing)
    fit = clusters.fill_from_groups(layer, network(), tokens, torch.Generator().manual_seed(0))
    expert = clusters._chosen(layer, tokens.x_TD)[:, 0]
    assert float((expert == kind)[few].float().mean()) in (0.0, 1.0)
    assert fit.load_cv2 < 0.02
    assert fit.error < fit.one_expert_error


def test_memory_of_a_sample_does_not_grow_and_every_token_is_as_likely():
    sample = TokenSample(1000, seed=0)
    for start in range(0, 20_000, 500):
        sample.add(torch.arange(start, start + 500.0).unsqueeze(1))
    kept = sample.rows()
    assert kept.shape == (1000, 1)
    assert len(kept.unique()) > 950  # two of a batch may draw one place
    assert float(kept.mean()) == pytest.approx(10_000, rel=0.06)


def test_tokens_weigh_what_they_mean_for_the_answer(dense, batches):
    """Of the last block nothing but the class token is looked at."""
    blocks = {str(index): (dense.blocks[index], family_of(dense).ffn(dense.blocks[index])) for index in (2, 5)}
    requires = [parameter.requires_grad for parameter in dense.parameters()]
    tokens = sample_tokens(dense, blocks, batches[:1])
    assert [parameter.requires_grad for parameter in dense.parameters()] == requires
    last = tokens["5"].weight_T.sort(descending=True).values
    assert float(last[len(batches[0]) - 1] / last[len(batches[0])]) > 100
    assert all(float(found.weight_T.mean()) == pytest.approx(1, rel=1e-5) for found in tokens.values())


def test_directions_that_answers_depend_on_are_fitted_more_closely():
    ffn, x = network(), two_kinds()[0]
    metric = tokens_module.metric_of(torch.diag(torch.tensor([1.0, 1.0] + [0.0] * (ffn.dim - 2))))
    minded = fitting.fitted(ffn, Tokens(x, torch.ones(len(x)), metric), ffn.hidden_dim, 4)
    plain = fitting.fitted(ffn, alike(x), ffn.hidden_dim, 4)
    apart = [(fit(x) - ffn(x)).square().sum(0) for fit in (minded, plain)]
    assert apart[0][:2].sum() < 0.9 * apart[1][:2].sum()
    assert apart[0].sum() > apart[1].sum()


def test_heavy_tokens_are_fitted_more_closely():
    ffn, (x, kind) = network(), two_kinds()
    first = Tokens(x, torch.where(kind == 0, 1.99, 0.01))
    own = x[kind == 0]
    assert error(fitting.fitted(ffn, first, 12), ffn, own) < error(fitting.fitted(ffn, alike(x), 12), ffn, own)


def test_full_size_keeps_outputs_and_routes_by_content(dense, batches):
    sparse = convert(dense, batches)
    torch.testing.assert_close(sparse(batches[0]), dense(batches[0]), atol=1e-5, rtol=1e-4)
    with ermoe.record_routing(sparse) as routing:
        sparse(batches[1])
    assert all(figures["load_cv2"] < 0.2 for figures in routing.summary().values())


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_dim": 128},
        {"rank": 24},
        {"rank": 24, "routing_basis": "experts"},
        {"experts": "dense", "hidden_dim": 96},
    ],
    ids=str,
)
def test_smaller_experts_say_how_near_they_come(dense, batches, options):
    sparse = convert(dense, batches, **options)
    assert list(sparse.group_fits) == ["blocks.2", "blocks.5"]
    for name, fit in sparse.group_fits.items():
        assert 0 < fit.error < 1
        assert sparse.output_error[name] == fit.error
    for layer in moe_layers(sparse).values():
        for part in layer.experts.linears():
            for basis in [getattr(part, side) for side in ("U", "V") if hasattr(part, side)]:
                assert float(orthonormality_error(basis.detach()).max()) < 1e-5


def test_a_width_for_each_block_survives_saving(dense, batches, tmp_path):
    sparse = convert(dense, batches, experts="dense", hidden_dim=[96, 128])
    ermoe.save(sparse, tmp_path / "model")
    again = ermoe.load(tmp_path / "model").eval()
    assert torch.equal(again(batches[0]), sparse(batches[0]))
    widths = [layer.experts.size[0] for layer in moe_layers(again).values()]
    assert widths == [96, 128]


def test_two_experts_a_token(dense, batches):
    sparse = convert(dense, batches, top_k=2, hidden_dim=128)
    assert torch.isfinite(sparse(batches[0])).all()


def test_a_lower_rank_of_equal_experts_is_fitted_too(dense, batches):
    plain, fitted = (ermoe.upcycle(dense, rank=24, blocks=[5], calibration=given) for given in (None, batches))
    ffn = family_of(dense).ffn(dense.blocks[5])
    x = sample_tokens(dense, {"5": (dense.blocks[5], ffn)}, batches)["5"].x_TD
    wanted = ffn(x)

    @torch.no_grad()
    def distance(model):
        counts = torch.tensor([len(x), *[0] * 7])
        return float((model.blocks[5].mlp.experts(x, counts) - wanted).norm())

    assert distance(fitted) < distance(plain)


def test_the_dense_model_stays_as_it_was(dense, batches):
    before = copy.deepcopy(dense.state_dict())
    convert(dense, batches, hidden_dim=96)
    assert all(torch.equal(tensor, before[name]) for name, tensor in dense.state_dict().items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_precisions_are_fitted_alike(dense, batches, dtype):
    options = {"rank": 16, "blocks": [5]}
    usual = convert(dense, batches, **options)
    other = convert(copy.deepcopy(dense).to(dtype), [batch.to(dtype) for batch in batches], **options)
    assert {parameter.dtype for parameter in other.parameters()} == {dtype}
    assert other.group_fits["blocks.5"].error == pytest.approx(usual.group_fits["blocks.5"].error, rel=0.2)


def test_gradients_that_are_switched_off_do_not_matter(dense, batches):
    with torch.no_grad():
        assert convert(dense, batches, rank=16, blocks=[5]).group_fits["blocks.5"].error < 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": None}, "pass calibration="),
        ({"calibration": iter([torch.zeros(1, 3, 160, 160)])}, "goes through them twice"),
        ({"router": "v-moe"}, "use router='eigen'"),
        ({"hidden_dim": 0}, "hidden_dim=0: the dense network has"),
        ({"hidden_dim": 1000}, "the dense network has 192 hidden units"),
        ({"hidden_dim": [64]}, "one for each of the 2 blocks"),
        ({"score": "eigenbasis"}, "only score='prototype'"),
        ({"routing_basis": "borrowed"}, "use 'experts', 'own' or 'shared'"),
        ({"experts": "dense", "routing_basis": "experts"}, "dense experts have no basis"),
    ],
)
def test_what_cannot_be_grouped_is_refused_with_a_remedy(dense, batches, options, message):
    options = {"calibration": batches, "num_experts": 3, "blocks": [2, 5], **options}
    with pytest.raises(UserError, match=message.replace("(", r"\(")):
        ermoe.upcycle(dense, init="clusters", **options)


def test_too_few_tokens_are_refused():
    model = timm.create_model("test_vit", img_size=32)
    with pytest.raises(UserError, match="tokens for 8 experts: pass more images"):
        ermoe.upcycle(model, init="clusters", calibration=[torch.randn(1, 3, 32, 32)])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_networks_fitted_together_are_nearer_than_one_of_their_width_for_all(gated, bias):
    ffn = network(gated=gated, bias=bias)
    x, kind = two_kinds()
    groups = [alike(x[kind == number]) for number in (0, 1)]
    shared, beside = fitted_together(ffn, groups, 12, 6)
    one = fitting.fitted(ffn, alike(x), 18)
    assert [part.hidden_dim for part in (shared, *beside)] == [12, 6, 6]

    def apart(network):
        return sum(
            float((network(number, own.x_TD) - ffn(own.x_TD)).square().sum()) for number, own in enumerate(groups)
        )

    assert apart(lambda number, x: shared(x) + beside[number](x)) < 0.9 * apart(lambda _, x: one(x))


def test_networks_fitted_together_solve_all_groups_at_once():
    """Beside the slow twin: one regression in which every group has columns of its own, by stacking equations."""
    ffn = network()
    ffn = FFN(*(Linear(part.W.double(), part.b.double()) for part in (ffn.up, ffn.down)), ffn.act, ffn.norm)
    x, kind = two_kinds()
    groups = [alike(x[kind == number].double()) for number in (0, 1)]
    shared, beside = fitted_together(ffn, groups, 12, 6)
    units = [
        [int((ffn.up.W - column.unsqueeze(1)).abs().sum(0).argmin()) for column in part.up.W.mT]
        for part in (shared, *beside)
    ]
    rows, wanted = [], []
    for number, own in enumerate(groups):
        hidden = ffn.hidden(own.x_TD)
        a, y = hidden - hidden.mean(0), ffn(own.x_TD) - ffn(own.x_TD).mean(0)
        kept = [*units[0], *units[1 + number]]
        variance = a[:, kept].square().mean(0).mean() * len(a)
        row = torch.zeros(len(a) + 18, 24).double()
        columns = [*range(12), *range(12 + 6 * number, 18 + 6 * number)]
        row[: len(a), columns] = a[:, kept]
        ridge = torch.tensor([fitting.ridge_of(12, len(x))] * 12 + [fitting.ridge_of(6, len(a))] * 6)
        root = torch.diag((ridge.double() * variance).sqrt())
        row[len(a) :, columns] = root
        rows.append(row)
        wanted.append(torch.cat([y, root @ ffn.down.W[kept]]))
    solution = torch.linalg.lstsq(torch.cat(rows), torch.cat(wanted)).solution
    found = torch.cat([part.down.W for part in (shared, *beside)])
    torch.testing.assert_close(found, solution, atol=1e-6, rtol=1e-6)
    for network_of, own in zip(beside, groups, strict=True):  # the mean of every group is kept
        mean = (shared(own.x_TD) + network_of(own.x_TD)).mean(0)
        torch.testing.assert_close(mean, ffn(own.x_TD).mean(0), atol=1e-9, rtol=1e-9)


def test_errors_of_networks_fitted_together_are_those_of_the_other_half():
    ffn = network()
    x, kind = two_kinds()
    groups = [alike(x[kind == number]) for number in (0, 1)]
    halves = [[alike(own.x_TD[start::2]) for own in groups] for start in (0, 1)]
    shared, beside = fitted_together(ffn, halves[0], 12, 6)
    squares = []
    for fit, other in zip(beside, halves[1], strict=True):
        apart = shared(other.x_TD) + fit(other.x_TD) - ffn(other.x_TD)
        squares.append((apart - apart.mean(0)).square().sum(1))  # as if biases had met the other half
    (found,) = errors_together(ffn, groups, [(12, 6)])
    assert found == pytest.approx(float(torch.cat(squares).mean()), rel=1e-3)


def test_a_narrow_shared_network_is_part_of_the_layer(dense, batches, tmp_path):
    sizes = {"hidden_dim": [16, 24], "shared": [48, 0], "experts": "dense"}
    model = convert(dense, batches, **sizes)
    first, second = moe_layers(model).values()
    assert first.shared.size[0] == 48
    assert second.shared is None
    fit = model.group_fits["blocks.2"]
    assert fit.error < fit.one_expert_error
    ermoe.save(model, tmp_path / "model")
    torch.testing.assert_close(ermoe.load(tmp_path / "model").eval()(batches[0]), model.eval()(batches[0]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared": 16, "hidden_dim": 8, "experts": "eigen"}, "use experts='dense'"),
        ({"shared": 180, "hidden_dim": 64, "experts": "dense"}, "together these are more than"),
        ({"shared": 500, "hidden_dim": 8, "experts": "dense"}, "use 1 to"),
        ({"shared": "half"}, "use 'dense', which keeps the dense network, a hidden width"),
    ],
)
def test_shared_networks_that_cannot_be_are_refused(dense, batches, options, message):
    with pytest.raises(UserError, match=message):
        convert(dense, batches, **options)


def test_a_narrow_shared_network_wants_tokens(dense, batches):
    with pytest.raises(UserError, match="use init='clusters'"):
        ermoe.upcycle(dense, shared=16, hidden_dim=8, experts="dense", calibration=batches)
