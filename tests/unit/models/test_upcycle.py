"""A dense model made sparse computes the same thing, whatever its family."""

import copy
import gc
import logging
import pickle
import weakref

import pytest
import timm
import torch
from torch import nn

import ermoe
from ermoe.models.backbones import SparseBlock, family_of
from ermoe.models.upcycle import choose_blocks
from ermoe.nn import EigenLinear, MoE
from ermoe.nn.registry import LAYERS
from support.backbones import ACCEPTED, TIMM, build, distance, outputs, perturb, photographs

FAMILIES = [*ACCEPTED, "torchvision", "hugging face"]


@pytest.fixture
def dense():
    return build("test_vit")[0]


class TestParity:
    @pytest.mark.parametrize("name", FAMILIES)
    @pytest.mark.parametrize("experts", ["eigen", "dense"])
    def test_outputs_stay(self, name, experts):
        dense, size = build(name)
        images = photographs(size)
        sparse = ermoe.upcycle(dense, num_experts=4, experts=experts)
        before, after = outputs(dense, images), outputs(sparse, images)
        assert distance(after, before) <= 1e-4
        assert torch.equal(after.argmax(-1), before.argmax(-1))

    @pytest.mark.parametrize("name", FAMILIES)
    def test_an_error_in_one_layer_would_show(self, name):
        dense, size = build(name)
        sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
        with torch.no_grad():
            _, block = family_of(sparse).blocks(sparse)[1]
            block.mlp.experts.down.s *= 1.01
        assert distance(outputs(sparse, photographs(size)), outputs(dense, photographs(size))) > 1e-3

    @pytest.mark.parametrize(
        "options", [{"num_experts": 3, "top_k": 1}, {"num_experts": 16, "top_k": 3}, {"blocks": "all"}]
    )
    def test_outputs_stay_for_other_shapes(self, dense, options):
        sparse = ermoe.upcycle(dense, **options)
        assert distance(outputs(sparse, photographs(64)), outputs(dense, photographs(64))) <= 1e-4

    @pytest.mark.parametrize("score", ["eigenbasis", "prototype", "energy", "logit"])
    @pytest.mark.parametrize("experts", ["eigen", "dense"])
    def test_outputs_stay_with_every_score(self, dense, score, experts):
        sparse = ermoe.upcycle(dense, num_experts=4, score=score, experts=experts)
        assert distance(outputs(sparse, photographs(64)), outputs(dense, photographs(64))) <= 1e-4

    def test_the_gradient_of_the_backbone_stays(self, dense):
        sparse = ermoe.upcycle(dense, num_experts=4)
        for model in (dense, sparse):
            model(photographs(64)).logsumexp(-1).sum().backward()
        grads = dict(dense.named_parameters())
        for name, parameter in sparse.named_parameters():
            if name in grads:
                assert distance(parameter.grad, grads[name].grad) < 1e-3, name

    def test_it_stays_in_half_precision(self, dense):
        dense = dense.to(torch.bfloat16)
        sparse = ermoe.upcycle(dense, num_experts=4)
        assert {p.dtype for p in sparse.parameters()} == {torch.bfloat16}
        images = photographs(64).bfloat16()
        assert distance(outputs(sparse, images).float(), outputs(dense, images).float()) < 0.2

    def test_hugging_face_without_a_head(self):
        dense, size = build("hugging face")
        sparse = ermoe.upcycle(dense.vit, num_experts=4)
        with torch.no_grad():
            before, after = (model(photographs(size)).last_hidden_state for model in (dense.vit, sparse))
        assert distance(after, before) <= 1e-4
        assert sparse.layers[1].mlp.experts.num_experts == 4


class TestNewForms:
    @pytest.mark.parametrize(
        "name",
        ["eva02_base_patch16_clip_224", "beitv2_base_patch16_224", "samvit_base_patch16", "eva02_small_patch14_224"],
    )
    def test_every_parameter_learns(self, name):
        dense, size = build(name)
        sparse = perturb(ermoe.upcycle(dense, num_experts=2)).train()
        sparse(photographs(size, 2)).logsumexp(-1).sum().backward()
        assert [name for name, parameter in sparse.named_parameters() if parameter.grad is None] == []

    @pytest.mark.parametrize("options", [{"rank": 32}, {"shared": "dense"}, {"init": "same"}, {"experts": "dense"}])
    def test_experts_may_be_smaller_and_still_have_the_inner_norm(self, options):
        dense, size = build("eva02_base_patch16_clip_224")
        sparse = ermoe.upcycle(dense, num_experts=2, **options)
        layer = sparse.blocks[1].mlp
        assert {type(experts.inner_norm) for experts in (layer.experts, layer.shared) if experts} == {nn.LayerNorm}
        if "shared" in options or "experts" in options:
            assert distance(outputs(sparse, photographs(size)), outputs(dense, photographs(size))) <= 1e-4

    def test_fewer_units_would_have_another_norm(self):
        dense, size = build("eva02_base_patch16_clip_224")
        with pytest.raises(ValueError, match=r"normalises its hidden layer.*rank="):
            ermoe.upcycle(dense, num_experts=2, hidden_dim=32, calibration=[photographs(size)])

    @pytest.mark.parametrize("name", ["naflexvit_base_patch16_map", "eva02_small_patch14_224"])
    def test_padding_is_neither_routed_nor_counted(self, name):
        """Two images of different sizes in one batch, the smaller one padded with what would spoil everything."""
        dense, _ = build(name)
        sparse = ermoe.upcycle(dense, num_experts=4)
        height, width = dense.embeds.patch_size
        grids, longest = [(4, 4), (2, 3)], 16
        patches = torch.randn(2, longest, height * width * 3, generator=torch.Generator().manual_seed(0))
        valid, coord = torch.zeros(2, longest, dtype=torch.bool), torch.zeros(2, longest, 2, dtype=torch.long)
        for image, (rows, columns) in enumerate(grids):
            valid[image, : rows * columns] = True
            coord[image, : rows * columns] = torch.cartesian_prod(torch.arange(rows), torch.arange(columns))
        patches[~valid] = 1e4
        batch = {"patches": patches, "patch_coord": coord, "patch_valid": valid}
        counted = []
        sparse.blocks[1].mlp.observers.append(lambda routing: counted.append(int(routing.count_E.sum())))
        with torch.no_grad():
            assert distance(sparse(batch), dense(batch)) <= 1e-4
        assert counted == [2 * (16 + 6 + 2 * dense.num_prefix_tokens)]

    def test_the_context_stays_within_its_window(self):
        """Slow twin: windows cut out by hand; the grid of 6 × 6 tokens has windows of 4 × 4 that reach beyond it."""
        dense, size = build("samvit_base_patch16")
        sparse = ermoe.upcycle(dense, num_experts=4, blocks=[3])
        block, seen = sparse.blocks[3], {}
        block.mlp.register_forward_pre_hook(lambda _, args: seen.update(z=args[0], context=args[1]))
        block.attend = lambda *args, **kwargs: seen.setdefault("attended", SparseBlock.attend(block, *args, **kwargs))
        outputs(sparse, photographs(size, 1))
        z, context = (seen[name].view(6, 6, 64) for name in ("z", "context"))
        alpha = seen["attended"][1].view(2, 2, 16, 4, 4)
        for row, column in ((0, 0), (3, 5), (5, 2)):
            weights = alpha[row // 4, column // 4, 4 * (row % 4) + column % 4]
            expected = torch.zeros(64)
            for y in range(4):
                for x in range(4):
                    inside = (4 * (row // 4) + y, 4 * (column // 4) + x)
                    if max(inside) < 6:
                        expected += weights[y, x] * z[inside]
            assert torch.allclose(context[row, column], expected, atol=1e-4)


class TestStructure:
    def test_names_and_modules_of_the_backbone_stay(self, dense):
        sparse = ermoe.upcycle(dense, inplace=True)
        assert sparse is dense
        names = dict(sparse.named_parameters())
        assert "blocks.1.attn.qkv.weight" in names
        assert "blocks.1.norm2.weight" in names
        assert not any(name.startswith("blocks.1.mlp.fc") for name in names)
        assert isinstance(sparse.blocks[1], timm.models.vision_transformer.Block)
        assert isinstance(sparse.blocks[1].mlp, MoE)
        assert not isinstance(sparse.blocks[0], SparseBlock)

    def test_a_copy_leaves_the_original_alone(self, dense):
        before = copy.deepcopy(dense.state_dict())
        ermoe.upcycle(dense)
        assert not any(isinstance(block, SparseBlock) for block in dense.blocks)
        assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())

    @pytest.mark.parametrize(
        ("blocks", "chosen"),
        [
            ("every-2", (1, 3, 5)),
            ("every-3", (2, 5)),
            ("last-2", (4, 5)),
            ("all", (0, 1, 2, 3, 4, 5)),
            ([-1, 0], (0, 5)),
        ],
    )
    def test_blocks(self, dense, blocks, chosen):
        sparse = ermoe.upcycle(dense, blocks=blocks)
        assert sparse.sparsity.blocks == chosen
        assert tuple(i for i, block in enumerate(sparse.blocks) if isinstance(block, SparseBlock)) == chosen

    def test_every_2_of_twelve_is_the_papers(self):
        assert choose_blocks("every-2", 12) == (1, 3, 5, 7, 9, 11)

    def test_default_ranks(self):
        layer = ermoe.upcycle(build("vit_tiny_patch16_224")[0]).blocks[1].mlp
        assert layer.experts.up.s.shape == (8, 192)
        assert layer.router.score.route_rank == 24

    def test_copies_and_pickles_work(self, dense):
        sparse = ermoe.upcycle(dense, num_experts=4)
        for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
            assert torch.equal(outputs(twin, photographs(64)), outputs(sparse, photographs(64)))
            assert twin.no_weight_decay() == sparse.no_weight_decay()

    def test_a_model_is_released_at_once(self, dense):
        """No reference cycle keeps its memory until the garbage collector comes by."""
        gc.collect()
        gc.disable()
        try:
            sparse = ermoe.upcycle(dense, num_experts=4)
            outputs(sparse, photographs(64))
            alive = weakref.ref(sparse.blocks[1].mlp.experts.up.U)
            del sparse
            assert alive() is None
        finally:
            gc.enable()

    def test_timm_optimisers_spare_the_bases(self, dense):
        sparse = ermoe.upcycle(dense)
        assert "blocks.1.mlp.experts.up.U" in sparse.no_weight_decay()
        assert "pos_embed" in sparse.no_weight_decay()

    def test_training_mode_and_device_follow_the_block(self, dense):
        sparse = ermoe.upcycle(dense.train())
        assert all(module.training for module in sparse.modules())

    def test_a_model_without_memory_can_be_made_sparse(self):
        with torch.device("meta"):
            model = timm.create_model("test_vit")
        sparse = ermoe.upcycle(model)
        assert all(parameter.is_meta for parameter in sparse.parameters())


class TestContext:
    def test_attention_is_left_alone_when_no_context_is_needed(self, dense, monkeypatch):
        monkeypatch.setattr(SparseBlock, "attend", lambda *args, **kwargs: pytest.fail("unfused attention"))
        sparse = ermoe.upcycle(dense, num_experts=4, score="prototype")
        assert outputs(sparse, photographs(64)).isfinite().all()

    @pytest.mark.parametrize("name", ["test_vit", "eva02_tiny_patch14_224", "torchvision", "hugging face"])
    def test_the_context_is_the_attention_weighted_mean(self, name):
        """Slow twin: the block's own attention with one-hot values shows its weights; then a plain loop."""
        dense, size = build(name)
        sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
        _, block = family_of(sparse).blocks(sparse)[1]
        seen = {}
        block.mlp.register_forward_pre_hook(lambda _, args: seen.update(z=args[0], context=args[1].averaged(args[0])))
        block.attend = lambda *args, **kwargs: seen.setdefault("attended", SparseBlock.attend(block, *args, **kwargs))
        outputs(sparse, photographs(size, 2))
        alpha, z = seen["attended"][1], seen["z"]
        assert torch.allclose(alpha.sum(-1), torch.ones_like(alpha[..., 0]), atol=1e-5)
        for image in range(len(z)):
            for token in (0, 3):
                expected = sum(alpha[image, token, other] * z[image, other] for other in range(z.shape[1]))
                assert torch.allclose(seen["context"][image, token], expected, atol=1e-4)

    def test_the_context_may_average_what_attention_says(self, dense):
        by_features = ermoe.upcycle(dense, num_experts=4)
        by_attention = ermoe.upcycle(dense, num_experts=4, context_of="attention")
        contexts = []
        for model in (by_features, by_attention):
            model.blocks[1].mlp.register_forward_pre_hook(lambda _, args: contexts.append(args[1].averaged(args[0])))
            outputs(model, photographs(64))
        assert not torch.allclose(contexts[0], contexts[1])

    def test_without_gradient_the_context_gives_attention_none(self, dense):
        grads = {}
        for with_grad in (True, False):
            sparse = perturb(ermoe.upcycle(dense, num_experts=4, blocks=[1], context_grad=with_grad))
            sparse(photographs(64)).sum().backward()
            grads[with_grad] = sparse.blocks[1].attn.qkv.weight.grad
        assert not torch.allclose(grads[True], grads[False], rtol=1e-3)

    def test_without_gradient_the_outputs_are_the_same(self, dense):
        sparse = [perturb(ermoe.upcycle(dense, num_experts=4, context_grad=flag)) for flag in (True, False)]
        logits = [model(photographs(64)) for model in sparse]
        assert distance(logits[0], logits[1]) < 1e-4

    @pytest.mark.parametrize("causal", [False, True])
    def test_masks_reach_the_attention_weights(self, dense, causal):
        sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
        x = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(0))
        may_look = torch.ones(9, 9, dtype=torch.bool).tril()
        options = {"is_causal": True} if causal else {"attn_mask": may_look}
        with torch.no_grad():
            expected = dense.blocks[1](x, **options)
            assert torch.allclose(sparse.blocks[1](x, **options), expected, atol=1e-5)

    def test_hugging_face_still_shows_its_attention(self):
        dense, size = build("hugging face")
        dense.set_attn_implementation("eager")
        sparse = ermoe.upcycle(dense, num_experts=4)
        images = photographs(size)
        with torch.no_grad():
            before, after = (model(images, output_attentions=True).attentions for model in (dense, sparse))
        assert len(before) == len(after) == 4
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(before, after, strict=True))

    def test_hugging_face_attention_is_the_same_in_all_implementations(self):
        dense, size = build("hugging face")
        logits = []
        for implementation in ("eager", "sdpa"):
            dense.set_attn_implementation(implementation)
            logits.append(outputs(perturb(ermoe.upcycle(dense, num_experts=4)), photographs(size)))
        assert distance(logits[0], logits[1]) < 1e-4

    def test_hugging_face_eager_attention_gets_no_gradient_from_a_context_without_one(self):
        dense, size = build("hugging face")
        grads = []
        for implementation in ("eager", "sdpa"):
            dense.set_attn_implementation(implementation)
            sparse = perturb(ermoe.upcycle(dense, num_experts=4, blocks=[1], context_grad=False))
            sparse(photographs(size)).logits.sum().backward()
            grads.append(sparse.vit.layers[1].attention.q_proj.weight.grad)
        assert torch.allclose(grads[0], grads[1], rtol=1e-3, atol=1e-5)


NEW_TIMM = pytest.mark.skipif(
    tuple(int(part) for part in timm.__version__.split(".")[:3]) < (1, 0, 30), reason="needs timm 1.0.30"
)


class TestFormsOfAttention:
    @pytest.mark.parametrize(
        ("name", "options"),
        [
            ("test_vit", {"qk_norm": True, "scale_attn_norm": True}),
            ("test_vit", {"qkv_bias": False}),
            ("eva02_tiny_patch14_224", {"qkv_fused": False}),
            ("eva02_tiny_patch14_224", {"use_rot_pos_emb": False}),
            pytest.param(
                "eva02_tiny_patch14_224", {"attn_type": "rope", "qkv_fused": False, "num_kv_heads": 2}, marks=NEW_TIMM
            ),
            pytest.param(
                "eva02_tiny_patch14_224",
                {"attn_type": "rope", "qk_norm": True, "scale_attn_inner": True},
                marks=NEW_TIMM,
            ),
        ],
    )
    @pytest.mark.parametrize("score", ["eigenbasis", "prototype"])
    def test_outputs_stay(self, name, options, score):
        small, size = TIMM[name]
        dense = perturb(timm.create_model(name, **small, **options)).eval()
        sparse = ermoe.upcycle(dense, num_experts=4, score=score)
        assert distance(outputs(sparse, photographs(size)), outputs(dense, photographs(size))) <= 1e-4

    @pytest.mark.parametrize("gated", [False, pytest.param(True, marks=NEW_TIMM)])
    def test_gates_on_attention(self, gated):
        """timm can gate the output of attention; no registered architecture of these families does yet."""
        dense, size = build("test_vit")
        for block in dense.blocks:
            block.attn.gate = perturb(nn.Linear(64, 64), scale=0.5) if gated else None
        sparse = ermoe.upcycle(dense, num_experts=4)
        assert distance(outputs(sparse, photographs(size)), outputs(dense, photographs(size))) <= 1e-4

    def test_causal_masks_with_rotary_positions(self):
        dense, _ = build("eva02_tiny_patch14_224")
        sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
        x = torch.randn(2, 17, 64, generator=torch.Generator().manual_seed(0))
        rope = dense.rope.get_embed()
        with torch.no_grad():
            expected = dense.blocks[1](x, rope=rope, is_causal=True)
            assert torch.allclose(sparse.blocks[1](x, rope=rope, is_causal=True), expected, atol=1e-5)

    def test_hugging_face_masks(self):
        dense, size = build("hugging face")
        sparse = ermoe.upcycle(dense.vit, num_experts=4)
        mask = torch.ones(8, 17, dtype=torch.long)
        mask[:, 12:] = 0
        with torch.no_grad():
            before, after = (m(photographs(size), attention_mask=mask).last_hidden_state for m in (dense.vit, sparse))
        assert distance(after, before) <= 1e-4
        block = sparse.layers[1]
        x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
        real = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1]])
        with torch.no_grad():
            assert torch.equal(block(x, real), block(x, real.bool()[:, None, None, :]))


class TestRouters:
    @pytest.mark.parametrize("router", sorted(set(LAYERS) - {"eigen"}))
    def test_one_word_changes_the_method(self, dense, router):
        sparse = ermoe.upcycle(dense, num_experts=4, router=router)
        assert outputs(sparse, photographs(64)).isfinite().all()
        up = sparse.blocks[1].mlp.experts.up
        assert torch.equal(up.W[0], dense.blocks[1].mlp.fc1.weight.T)
        assert torch.equal(up.W[3], up.W[0])

    @pytest.mark.parametrize("name", ["test_vit", "eva02_tiny_patch14_224", "torchvision", "hugging face"])
    def test_soft_moe_gets_as_many_slots_as_tokens(self, name):
        sparse = ermoe.upcycle(build(name)[0], num_experts=4, router="soft")
        layer = family_of(sparse).blocks(sparse)[1][1].mlp
        assert layer.slots_per_expert * 4 == pytest.approx(17, abs=2)
        assert outputs(sparse, photographs(build(name)[1])).isfinite().all()

    def test_baselines_may_have_eigen_experts(self, dense):
        sparse = ermoe.upcycle(dense, num_experts=4, router="v-moe", experts="eigen")
        assert isinstance(sparse.blocks[1].mlp.experts.up, EigenLinear)

    def test_routers_are_seeded(self, dense):
        def gate(seed):
            generator = torch.Generator().manual_seed(seed)
            return dict(
                ermoe.upcycle(dense, router="cosine", generator=generator).blocks[1].mlp.router.named_parameters()
            )

        first, again, other = gate(0), gate(0), gate(1)
        assert all(torch.equal(first[name], again[name]) for name in first)
        assert any(not torch.equal(first[name], other[name]) for name in first)


class TestShared:
    @pytest.mark.parametrize(
        ("name", "init"),
        [
            ("test_vit", "dense"),
            ("test_vit", "clusters"),
            ("vit_giant_patch14_dinov2", "clusters"),  # gated
            ("hugging face", "dense"),
        ],
    )
    def test_outputs_stay_there_and_back_and_through_a_file(self, name, init, tmp_path):
        dense, size = build(name)
        images = photographs(size)
        calibration = [images] if init == "clusters" else None
        options = {"num_experts": 4, "shared": "dense", "init": init, "calibration": calibration}
        sparse = ermoe.upcycle(dense, blocks=[1], **options)
        before = outputs(dense, images)
        assert distance(outputs(sparse, images), before) <= 1e-5
        ermoe.save(sparse, tmp_path)
        for again in (ermoe.load(tmp_path).eval(), ermoe.to_dense(sparse)):
            assert distance(outputs(again, images), before) <= 1e-5
        with ermoe.record_routing(sparse) as routing:
            outputs(sparse, images)
        for figures in routing.summary().values():
            assert figures["spread"] > 0.1
            assert figures["orthonormality_error"] < 1e-5
        layer = family_of(sparse).blocks(sparse)[1][1].mlp
        assert layer.experts.size == (32, 16)  # of a width of 64

    @pytest.mark.parametrize("options", [{}, {"router": "v-moe"}, {"router": "emoe", "experts": "eigen"}])
    def test_all_that_is_silent_learns_to_speak(self, dense, options):
        sparse = ermoe.upcycle(dense, num_experts=4, shared="dense", blocks=[1], **options)
        optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
        for _ in range(2):  # the last weight first, then what is before it
            optimizer.zero_grad()
            sparse(photographs(64)).logsumexp(-1).sum().backward()
            optimizer.step()
        assert all(bool(p.grad.any()) for p in sparse.blocks[1].mlp.experts.parameters())
        with pytest.raises(ValueError, match=r"the experts of blocks\.1 add to the dense network by now"):
            ermoe.to_dense(sparse)

    def test_its_cost_is_one_dense_network_and_a_little(self, dense):
        counted = ermoe.count(ermoe.upcycle(dense, shared="dense", blocks=[1], top_k=1), 64)
        assert counted.multiply_adds.shared_expert == 17 * 2 * 64 * 192
        assert counted.multiply_adds.experts == 17 * 2 * 16 * (64 + 32)

    def test_it_is_a_part_of_its_own(self, dense):
        sparse = ermoe.upcycle(dense, shared="dense", blocks=[1], router="soft")
        kept = ermoe.freeze(sparse, "shared")
        assert kept == [f"blocks.1.mlp.shared.{side}.{part}" for side in ("down", "up") for part in ("W", "bias")]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ({"shared": "sparse"}, "shared='sparse': use 'dense'"),
            ({"shared": "dense", "calibration": [torch.zeros(1)]}, "nothing is fitted to calibration="),
            ({"shared_dim": 8}, "shared_dim: experts take this from the feed-forward network"),
        ],
    )
    def test_what_cannot_be_shared(self, dense, options, message):
        with pytest.raises(ValueError, match=message):
            ermoe.upcycle(dense, **options)


class TestOneExpert:
    """The baseline of every conversion: one low-rank network for all tokens."""

    @pytest.mark.parametrize("init", ["dense", "clusters"])
    def test_it_costs_its_expert_and_nothing_else(self, dense, init, tmp_path):
        images = photographs(64)
        sparse = ermoe.upcycle(dense, num_experts=1, top_k=1, rank=24, init=init, calibration=[images], blocks=[1])
        work = ermoe.count(sparse, 64).multiply_adds
        assert (work.routing, work.context) == (0, 0)
        assert work.experts == 17 * 2 * 24 * (64 + 192)
        assert all(0 < error < 0.5 for error in sparse.output_error.values())
        ermoe.save(sparse, tmp_path)
        assert torch.equal(outputs(ermoe.load(tmp_path).eval(), images), outputs(sparse, images))


class TestSameStart:
    """One fresh network in every expert."""

    @pytest.mark.parametrize("router", ["eigen", "v-moe", "soft", "logit"])
    def test_every_expert_is_the_same_fresh_network(self, dense, router):
        generator = torch.Generator().manual_seed(0)
        sparse = ermoe.upcycle(dense, num_experts=4, router=router, init="same", generator=generator)
        for block in (1, 3):
            experts, old = sparse.blocks[block].mlp.experts, dense.blocks[block].mlp
            for stacked, linear in ((experts.up, old.fc1), (experts.down, old.fc2)):
                weight = stacked.matrices()
                bound = (6 / sum(linear.weight.shape)) ** 0.5
                assert torch.allclose(weight, weight[:1].expand_as(weight), atol=1e-5)
                assert bound > weight.abs().max() > 0.95 * bound, "Xavier, uniform"
                assert not torch.allclose(weight[0], linear.weight.mT, atol=1e-2)
                assert not stacked.bias.any()

    def test_yet_their_tokens_differ(self, dense):
        sparse = ermoe.upcycle(dense, num_experts=4, init="same", generator=torch.Generator().manual_seed(0)).eval()
        basis = sparse.blocks[1].mlp.experts.token_basis[:, :, :8].detach()
        overlap = (basis[0].mT @ basis[1]).abs().max()
        assert overlap < 1e-5, "experts route by orthogonal subspaces"

    def test_the_dense_model_is_left_as_it_was(self, dense):
        before = {name: tensor.clone() for name, tensor in dense.state_dict().items()}
        ermoe.upcycle(dense, num_experts=4, init="same")
        assert all(torch.equal(before[name], tensor) for name, tensor in dense.state_dict().items())


class TestRandomStart:
    @pytest.mark.parametrize("init", ["same", "random"])
    def test_experts_start_apart_and_seeded(self, dense, init):
        def experts(seed):
            model = ermoe.upcycle(dense, init=init, generator=torch.Generator().manual_seed(seed))
            return model.blocks[1].mlp.experts.up.U

        assert torch.equal(experts(0), experts(0))
        assert not torch.equal(experts(0), experts(1))
        assert not torch.allclose(experts(0)[0], experts(0)[1]), (
            "also of equal experts the columns are in another order"
        )

    def test_it_trains(self, dense):
        sparse = ermoe.upcycle(dense, init="random", num_experts=4, generator=torch.Generator().manual_seed(0)).train()
        optimiser = torch.optim.Adam(sparse.parameters(), lr=1e-3)
        images, labels = photographs(64), torch.arange(8)
        losses = []
        for _ in range(12):
            loss = nn.functional.cross_entropy(sparse(images), labels) + 5e-5 * ermoe.orthogonality_loss(sparse)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            ermoe.update_balance(sparse)
            losses.append(loss.item())
        assert losses[-1] < losses[0] / 2

    def test_gradient_checkpointing_changes_nothing(self, dense):
        sparse = perturb(ermoe.upcycle(dense, num_experts=4)).train()
        grads = []
        for enable in (False, True):
            sparse.set_grad_checkpointing(enable)
            sparse.zero_grad()
            sparse(photographs(64)).sum().backward()
            grads.append([p.grad.clone() for p in sparse.parameters()])
        assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(*grads, strict=True))
        assert float(sparse.blocks[1].mlp.router.balance._accumulator[-1]) == 2 * 8 * 17


class TestRank:
    def test_a_cut_rank_is_reported(self, dense, caplog):
        with caplog.at_level(logging.WARNING, logger="ermoe"):
            sparse = ermoe.upcycle(dense, num_experts=4, rank=32)
        assert sparse.output_error.keys() == {"blocks.1", "blocks.3", "blocks.5"}
        assert all(0.01 < error < 1 for error in sparse.output_error.values())
        assert "blocks.3 0." in caplog.text

    def test_block_by_block_every_block_is_reported(self, dense):
        once = ermoe.upcycle(dense, num_experts=4, rank=32, blocks=[1, 3])
        twice = ermoe.upcycle(
            ermoe.upcycle(dense, num_experts=4, rank=32, blocks=[1]), num_experts=4, rank=32, blocks=[3]
        )
        assert twice.output_error == once.output_error

    def test_a_full_rank_has_nothing_to_report(self, dense, caplog):
        assert ermoe.upcycle(dense).output_error == {}
        assert caplog.text == ""

    def test_calibration_truncates_better(self, dense):
        images = photographs(64, 32)
        plain = ermoe.upcycle(dense, num_experts=4, rank=24)
        calibrated = ermoe.upcycle(dense, num_experts=4, rank=24, calibration=[images[:16], (images[16:], None)])
        reference = outputs(dense, photographs(64))
        errors = [(outputs(model, photographs(64)) - reference).norm() for model in (plain, calibrated)]
        assert errors[1] < 0.7 * errors[0]
        assert max(calibrated.output_error.values()) < min(plain.output_error.values())

    def test_bases_are_orthonormal_after_all(self, dense):
        for options in ({}, {"rank": 24}, {"rank": 24, "calibration": [photographs(64)]}):
            assert ermoe.orthogonality_loss(ermoe.upcycle(dense, num_experts=4, **options)).item() < 1e-7
