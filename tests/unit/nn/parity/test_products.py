"""All ways to do the sorted products give the same numbers, forwards and backwards."""

from functools import partial

import pytest
import torch
from torch import nn

from ermoe.nn import EigenMoE, build_experts, products
from ermoe.nn.order import falling_order, stable_top_k

KINDS = {
    "eigen": lambda: build_experts(16, 32, num_experts=5, rank=8, experts="eigen"),
    "eigen-gated": lambda: build_experts(16, 32, num_experts=5, rank=8, gated=True, act_layer=nn.SiLU, experts="eigen"),
    "dense": lambda: build_experts(16, 32, num_experts=5),
    "dense-gated-no-bias": lambda: build_experts(16, 32, num_experts=5, gated=True, bias=False),
}


def gradients(experts, x, y):
    return torch.autograd.grad(y.square().sum(), [x, *experts.parameters()])


@pytest.mark.parametrize("counts", [[4, 3, 2, 6, 5], [0, 20, 0, 0, 0], [0, 0, 0, 0, 0], [1, 0, 0, 0, 19]])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["grouped", "padded"])
def test_all_experts_at_once_equal_one_expert_at_a_time(way, kind, counts):
    torch.manual_seed(0)
    experts = KINDS[kind]()
    x = torch.randn(sum(counts), 16, requires_grad=True)
    count_E = torch.tensor(counts)
    at_a_time = products.expert_at_a_time(experts.expert, x, count_E)
    at_once = getattr(products, way)(experts.expert, x, count_E)
    torch.testing.assert_close(at_once, at_a_time, rtol=0, atol=1e-5)
    for fast, slow in zip(gradients(experts, x, at_once), gradients(experts, x, at_a_time), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-5, atol=1e-5)


def test_small_experts_of_about_equal_load_are_padded():
    assert products.pays_to_pad(torch.tensor([400, 450, 380, 440]), 192)
    assert not products.pays_to_pad(torch.tensor([400, 450, 380, 440]), 768)  # together they leave the cache
    assert not products.pays_to_pad(torch.tensor([400, 800, 10, 460]), 192)  # half of it would be padding


@pytest.mark.parametrize("kind", KINDS)
def test_every_expert_equals_each_expert_alone(kind):
    torch.manual_seed(0)
    experts = KINDS[kind]()
    x = torch.randn(7, 16)
    all_outputs = experts.every_expert(x)
    for expert in range(5):
        counts = torch.zeros(5, dtype=torch.long)
        counts[expert] = 7
        torch.testing.assert_close(all_outputs[expert], experts(x, counts), rtol=0, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"below_threshold": "prune"}, {"capacity_factor": 0.7}])
@pytest.mark.parametrize("path", ["every_expert", "expert_by_expert"])
def test_the_layer_of_a_file_equals_the_sorted_one(options, path):
    torch.manual_seed(0)
    layer = EigenMoE(16, num_experts=4, **options)
    x, context = torch.randn(2, 9, 16), torch.randn(2, 9, 16)
    sorted_output = layer(x, context)
    setattr(layer, path, True)
    torch.testing.assert_close(layer(x, context), sorted_output, rtol=0, atol=1e-5)


def test_grouped_products_refuse_what_the_kernel_cannot_take():
    assert products.fits_grouped(torch.empty(1, dtype=torch.float32), 504, 768)
    assert not products.fits_grouped(torch.empty(1, dtype=torch.float32), 6)  # 24 bytes
    assert products.fits_grouped(torch.empty(1, dtype=torch.bfloat16), 8)
    assert not products.fits_grouped(torch.empty(1, dtype=torch.bfloat16), 4)
    assert not products.fits_grouped(torch.empty(1, dtype=torch.float64), 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert not products.fits_grouped(torch.empty(1, dtype=torch.float32), 4)


@pytest.mark.parametrize("rows", [10, 2000])
@pytest.mark.parametrize("way", ["expert_at_a_time", "padded", "grouped", "every_expert"])
def test_many_rows_meet_a_merged_weight_and_get_the_same_numbers(way, rows, monkeypatch):
    """At full rank, R (I + O) > I O: with enough rows it pays to build W = U diag(s) Vᵀ."""
    torch.manual_seed(0)
    experts = build_experts(16, 32, num_experts=2, rank=16, experts="eigen")
    x = torch.randn(2 * rows, 16, requires_grad=True)
    merges = []
    monkeypatch.setattr(products, "_merge", lambda *factors, merge=products._merge: merges.append(1) or merge(*factors))
    count_E = torch.tensor([rows, rows])
    if way == "every_expert":
        y = torch.cat([own[e * rows : (e + 1) * rows] for e, own in enumerate(experts.every_expert(x))])
    else:
        y = getattr(products, way)(experts.expert, x, count_E)
    assert bool(merges) is (rows == 2000)
    gradients_of_it = gradients(experts, x, y)
    W1, W2 = experts.up.matrices(), experts.down.matrices()
    hidden = nn.functional.gelu(x.view(2, rows, 16) @ W1 + experts.up.bias[:, None])
    expected = (hidden @ W2 + experts.down.bias[:, None]).view(-1, 16)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-5)
    for fast, slow in zip(gradients_of_it, gradients(experts, x, expected), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("way", ["expert_at_a_time", "padded", "grouped"])
def test_singular_values_go_with_the_rows_or_into_a_basis(way):
    torch.manual_seed(0)
    experts = build_experts(16, 32, num_experts=2, rank=8, experts="eigen")
    nn.init.uniform_(experts.up.s)
    nn.init.uniform_(experts.down.s)
    x = torch.randn(80, 16, requires_grad=True)
    run = partial(getattr(products, way), experts.expert)
    whole = run(x, torch.tensor([40, 40]))  # more rows than a basis has
    halves = [torch.cat([x[first : first + 10], x[40 + first : 50 + first]]) for first in (0, 10, 20, 30)]
    parts = [run(part, torch.tensor([10, 10])) for part in halves]
    few = torch.cat([part[:10] for part in parts] + [part[10:] for part in parts])
    torch.testing.assert_close(whole, few, rtol=0, atol=1e-5)
    for fast, slow in zip(gradients(experts, x, whole), gradients(experts, x, few), strict=True):
        torch.testing.assert_close(fast, slow, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_best_without_a_sort_are_the_first_of_a_stable_one(k):
    ranking_TE = torch.randint(0, 3, (200, 6), generator=torch.Generator().manual_seed(0)).float()  # many equal ones
    assert torch.equal(stable_top_k(ranking_TE, k), falling_order(ranking_TE)[:, :k])
