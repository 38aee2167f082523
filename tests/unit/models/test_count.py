"""Counting agrees with formulas written out by hand, with torch's counter, and with the paper where the paper fits."""

import functools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import ermoe
from ermoe.brain.rivals.sfcn import SFCN
from ermoe.errors import UserError
from ermoe.models.passes import every_expert
from ermoe.models.presets import PAPER, PRESETS, ways
from support.backbones import ACCEPTED, build, outputs, photographs


def on_meta(name):
    return ermoe.preset(name).build(device="meta")


@functools.cache
def count_of(name):
    return ermoe.count(on_meta(name))


class TestTheArithmeticOfThePaper:
    def test_v_moe(self):
        assert count_of("v-moe-b16").total_parameters / 1e6 == pytest.approx(284.9, abs=0.1)

    def test_ermoe(self):
        assert count_of("paper-b16").total_parameters / 1e6 == pytest.approx(243.0, rel=0.01)

    def test_the_dense_start(self):
        counted = count_of("vit-b16")
        assert counted.total_parameters == counted.active_parameters == 86_567_656
        assert counted.multiply_adds.total / 1e9 == pytest.approx(17.56, abs=0.01)

    def test_full_rank(self):
        assert count_of("parity-b16").total_parameters / 1e6 == pytest.approx(342, abs=0.5)

    def test_the_ways(self):
        full, merged, cut, plain, shared, v_moe = (way.count for way in ways(ermoe.preset("paper-b16")))
        assert full.multiply_adds.experts / v_moe.multiply_adds.experts == pytest.approx(1.25, abs=0.01)
        assert merged.multiply_adds.experts == v_moe.multiply_adds.experts
        assert merged.multiply_adds.routing == full.multiply_adds.routing
        assert cut.multiply_adds.experts / v_moe.multiply_adds.experts == pytest.approx(0.82, abs=0.01)
        assert plain.multiply_adds.experts == v_moe.multiply_adds.experts
        assert plain.multiply_adds.routing > v_moe.multiply_adds.routing
        work = shared.multiply_adds
        assert work.shared_expert == v_moe.multiply_adds.experts / 2  # one dense network a token
        assert 1.1 < (work.shared_expert + work.experts + work.routing + work.context) / work.shared_expert < 1.6

    def test_what_does_not_fit(self):
        """Two experts a token do not give the paper's active parameters."""
        for name in PAPER:
            assert count_of(name).active_parameters / 1e6 < PAPER[name].active - 5


class TestFormulas:
    """A ViT of width D = 64, hidden H = 192, N = 17 tokens, E experts of rank R, r columns that route."""

    D, H, N, E, K = 64, 192, 17, 8, 2

    def count(self, **options):
        return ermoe.count(ermoe.upcycle(build("test_vit")[0], **options), 64).multiply_adds

    @pytest.mark.parametrize(("rank", "route_rank"), [(64, 8), (24, 8), (40, 16)])
    def test_eigen_experts(self, rank, route_rank):
        work = self.count(rank=rank, route_rank=route_rank)
        assert work.experts == 3 * self.N * self.K * 2 * rank * (self.D + self.H)
        assert work.routing == 3 * self.N * self.D * self.E * route_rank
        assert work.context == 3 * self.N**2 * self.E * route_rank  # averages of the tokens' projections

    @pytest.mark.parametrize(("route_rank", "columns"), [(4, 32), (16, 64)])
    def test_contexts_of_something_else_take_a_projection_of_their_own(self, route_rank, columns):
        work = self.count(route_rank=route_rank, context_of="attention")
        assert work.routing == 3 * self.N * 2 * self.D * self.E * route_rank
        assert work.context == 3 * self.N**2 * columns  # before the average, or after it if that is narrower

    def test_dense_experts(self):
        assert self.count(experts="dense").experts == 3 * self.N * self.K * 2 * self.D * self.H

    def test_no_context_no_cost(self):
        work = self.count(score="prototype")
        assert work.context == 0
        assert work.routing == 3 * self.N * self.D * self.E * 8

    def test_attention(self):
        per_block = self.N * 4 * self.D**2 + 2 * self.N**2 * self.D
        assert self.count().attention == 6 * per_block

    def test_dense_blocks_patches_and_head(self):
        work = self.count()
        assert work.dense_ffn == 3 * self.N * 2 * self.D * self.H
        assert work.embedding == 16 * 3 * 16 * 16 * self.D
        assert work.head == self.D * 10

    def test_active_parameters(self):
        sparse = ermoe.upcycle(build("test_vit")[0], rank=24)
        experts = sum(p.numel() for p in sparse.blocks[1].mlp.experts.parameters())
        idle_columns = 6 * self.D * 8  # of the six experts a token does not meet, the columns that route are read
        counted = ermoe.count(sparse, 64)
        assert counted.total_parameters - counted.active_parameters == 3 * (experts * 6 // 8 - idle_columns)

    @pytest.mark.parametrize(("options", "pairs"), [({}, 2), ({"top_k": 3}, 3), ({"capacity_factor": 1.5}, 1.5)])
    def test_expert_choice(self, options, pairs):
        """As many experts a token as the router really gives it, up to the rounding of places."""
        sparse = ermoe.upcycle(build("test_vit")[0], router="expert-choice", **options)
        counted = ermoe.count(sparse, 64)
        per_expert = sum(p.numel() for p in sparse.blocks[1].mlp.experts.parameters()) // 8
        assert counted.multiply_adds.experts == 3 * round(self.N * pairs) * 2 * self.D * self.H
        assert counted.total_parameters - counted.active_parameters == 3 * (8 - pairs) * per_expert
        routed = len(sparse.blocks[1].mlp.route(torch.randn(5, 160, self.D)).token_A)
        assert routed / (5 * 160) == pairs == sparse.blocks[1].mlp.router.experts_per_token

    def test_soft_moe(self):
        work = self.count(router="soft")
        slots = 8 * 2  # 17 tokens over 8 experts
        assert work.experts == 3 * slots * 2 * self.D * self.H
        assert work.routing == 3 * 3 * self.N * slots * self.D  # logits, dispatch, combine


@pytest.mark.skipif(torch.__version__ < (2, 15), reason="the counter of an older torch leaves out averages")
@pytest.mark.parametrize("name", [*ACCEPTED, "torchvision", "hugging face"])
def test_the_static_path_agrees_with_torchs_counter(name, monkeypatch):
    """A real forward pass of all experts has the operations of the count, E / K times those of experts, plus mixing."""
    dense, size = build(name)
    sparse = ermoe.upcycle(dense, num_experts=4, top_k=1).requires_grad_(False)
    work = ermoe.count(sparse, size).multiply_adds
    monkeypatch.setattr("torch.backends.mha.get_fastpath_enabled", lambda: False)  # which the counter does not know
    with every_expert(sparse), FlopCounterMode(display=False) as counter:
        outputs(sparse, photographs(size)[:1])
    layers = [module for module in sparse.modules() if isinstance(module, ermoe.MoE)]
    num_tokens = []
    layers[0].register_forward_pre_hook(lambda _, args: num_tokens.append(args[0].shape[1]))
    outputs(sparse, photographs(size)[:1])
    mixing = len(layers) * 2 * num_tokens[0] * 4 * layers[0].experts.dim
    assert counter.get_total_flops() == 2 * (work.total + 3 * work.experts) + mixing


def test_counting_leaves_the_model_alone():
    sparse = ermoe.upcycle(build("test_vit")[0]).train()
    before = outputs(sparse, photographs(64))
    ermoe.count(sparse, 64)
    assert sparse.training
    assert not sparse.blocks[1].mlp.every_expert
    assert torch.equal(outputs(sparse, photographs(64)), before)


def test_counting_leaves_frozen_modules_in_their_mode():
    sparse = ermoe.upcycle(build("test_vit")[0]).train()
    sparse.blocks[0].eval()
    ermoe.count(sparse, 64)
    assert sparse.training
    assert not sparse.blocks[0].mlp.training


@pytest.mark.parametrize("size", [0, -1, 2.5, (64, 0), (3, 64, 64), "64"])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(UserError, match=r"image_size=.*need a positive whole number, or a tuple of 2"):
        ermoe.count(build("test_vit")[0], size)


@pytest.mark.parametrize("name", ["test_vit", "torchvision", "hugging face"])
def test_sizes_that_a_backbone_does_not_take_are_refused(name):
    with pytest.raises(UserError, match=r"image_size=\(100, 100\): this \w+ does not take such images"):
        ermoe.count(ermoe.upcycle(build(name)[0]), 100)


def test_a_network_without_blocks_is_refused():
    with pytest.raises(UserError, match="this SFCN has no transformer blocks"):
        ermoe.count(SFCN(channels=(4, 4, 4)))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_build(name):
    model = on_meta(name)
    assert PRESETS[name].about
    assert model.num_classes == 1000


def test_an_unknown_preset_is_named():
    with pytest.raises(ValueError, match="'paper-x': did you mean paper-b16"):
        ermoe.preset("paper-x")


def test_presets_take_other_heads_and_seeds():
    preset = ermoe.models.presets.Preset("test_vit", {"num_experts": 4})
    first, again = (preset.build(num_classes=3, generator=torch.Generator().manual_seed(1)) for _ in range(2))
    assert first.num_classes == 3
    assert torch.equal(first.blocks[1].mlp.experts.up.U, again.blocks[1].mlp.experts.up.U)


def test_operations_as_they_were_counted_before():
    counted = ermoe.count(build("test_vit")[0], 64)
    with pytest.warns(DeprecationWarning, match="multiply_adds"):
        assert counted.flops.total == 2 * counted.multiply_adds.total
