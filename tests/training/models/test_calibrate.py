"""Equal loads, budgets and capacities from unlabelled images."""

import pytest
import torch

import ermoe
from ermoe.models.calibrate import equal_load_offsets, threshold_for_budget
from ermoe.models.io import load_state
from ermoe.nn import Routing
from support.backbones import apart, build, outputs, photographs


def load_cv2(count_E):
    count_E = count_E.double()
    return float(count_E.var(correction=0) / count_E.mean() ** 2)


def routings(model, images):
    """What every layer decided on ``images``."""
    seen: dict[str, list[Routing]] = {}
    for name, module in model.named_modules():
        if isinstance(module, ermoe.MoE):
            module.observers.append(seen.setdefault(name, []).append)
    for batch in images.split(128):
        outputs(model.eval(), batch)
    for module in model.modules():
        if isinstance(module, ermoe.MoE):
            module.observers.clear()
    return seen


def loads(model, images):
    return {name: sum(r.count_E for r in seen) for name, seen in routings(model, images).items()}


class TestEqualLoad:
    @pytest.mark.parametrize(("num_experts", "top_k"), [(2, 1), (3, 2), (8, 1), (8, 2), (8, 7), (16, 4)])
    def test_every_expert_is_chosen_equally_often(self, num_experts, top_k):
        generator = torch.Generator().manual_seed(num_experts)
        bias = torch.randn(num_experts, generator=generator)
        score = torch.tanh(0.3 * torch.randn(8000, num_experts, generator=generator) + 0.5 * bias)
        offset = equal_load_offsets(score, top_k)
        count = (score + offset).topk(top_k).indices.flatten().bincount(minlength=num_experts)
        assert load_cv2(count) < 1e-5
        assert abs(float(offset.mean())) < 1e-6

    def test_with_a_threshold_loads_are_as_equal_as_it_allows(self):
        generator = torch.Generator().manual_seed(0)
        score = torch.tanh(0.4 * torch.randn(8000, 8, generator=generator) + 0.2 * torch.randn(8, generator=generator))
        router = ermoe.EigenMoE(16, num_experts=8, below_threshold="prune", threshold=0.1).router
        before = load_cv2(router.choose(score).count_E)
        router.balance.offset_E.copy_(equal_load_offsets(score, 2, threshold=0.1))
        assert load_cv2(router.choose(score).count_E) < 0.05 < before

    def test_all_experts_for_all_tokens_need_no_offsets(self):
        assert torch.equal(equal_load_offsets(torch.rand(10, 4), 4), torch.zeros(4))

    def test_no_tokens_need_no_offsets(self):
        assert torch.equal(equal_load_offsets(torch.rand(0, 4), 2), torch.zeros(4))

    def test_an_expert_that_always_wins_is_brought_down(self):
        score = torch.rand(1000, 4, generator=torch.Generator().manual_seed(0)) * 0.1
        score[:, 2] += 0.9
        offset = equal_load_offsets(score, 1)
        assert (score + offset).argmax(1).bincount(minlength=4).tolist() == [250] * 4


class TestBudget:
    @pytest.mark.parametrize(("top_k", "budget"), [(2, 1.0), (2, 1.5), (2, 1.9), (4, 1.5), (4, 3.0)])
    def test_the_threshold_keeps_as_many_experts_as_wanted(self, top_k, budget):
        score = torch.rand(5000, 8, generator=torch.Generator().manual_seed(0))
        router = ermoe.EigenMoE(16, num_experts=8, top_k=top_k, below_threshold="prune").router
        router.threshold = threshold_for_budget(score, top_k, budget)
        assert float(router.choose(score).count_E.sum()) / 5000 == pytest.approx(budget, abs=0.01)

    def test_a_budget_that_needs_a_negative_threshold_is_missed_aloud(self, caplog):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, below_threshold="prune")
        for block in sparse.blocks[1::2]:  # turned over, so that most scores are negative
            block.mlp.router.score.register_forward_hook(lambda _, __, score: -score)
        result = ermoe.calibrate(sparse, [photographs(64)], budget=2.0)["blocks.1.mlp"]
        assert result.threshold == 0.0
        assert result.experts_per_token < 1.9
        assert "blocks.1.mlp: T = 0 still prunes" in caplog.text

    def test_a_budget_missed_for_equal_scores_says_so(self, caplog):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, below_threshold="prune", blocks=[1])
        sparse.blocks[1].mlp.router.score.register_forward_hook(lambda _, __, score: torch.full_like(score, 0.25))
        result = ermoe.calibrate(sparse, [photographs(64)], budget=1.5)["blocks.1.mlp"]
        assert (result.threshold, result.experts_per_token) == (0.25, 2)
        assert "blocks.1.mlp: T = 0.250 keeps 2.00 experts a token, not 1.50: many scores equal it" in caplog.text
        assert "T = 0 " not in caplog.text


class TestCalibrate:
    def test_only_offsets_move(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
        before = {name: tensor.clone() for name, tensor in sparse.state_dict().items()}
        ermoe.calibrate(sparse, [photographs(64)])
        moved = {name for name, tensor in sparse.state_dict().items() if not torch.equal(tensor, before[name])}
        assert moved == {f"blocks.{i}.mlp.router.balance.offset_E" for i in (1, 3, 5)}
        assert not sparse.training

    def test_it_reports_what_it_did(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
        images = photographs(64, 32)
        report = ermoe.calibrate(sparse, [images])
        assert report.keys() == {"blocks.1.mlp", "blocks.3.mlp", "blocks.5.mlp"}
        for name, count_E in loads(sparse, images).items():
            assert report[name].load_cv2 == pytest.approx(load_cv2(count_E), abs=1e-6)
            assert report[name].load_cv2 < 1e-3
            assert report[name].experts_per_token == 2
            assert report[name].num_tokens == 32 * 17

    def test_a_second_round_follows_tokens_that_experts_moved(self):
        images = photographs(64, 64)
        worst = []
        for rounds in (1, 3):
            sparse = apart(ermoe.upcycle(build("test_vit")[0], num_experts=4), scale=0.2)
            ermoe.calibrate(sparse, [images], rounds=rounds)
            worst.append(max(load_cv2(count_E) for count_E in loads(sparse, images).values()))
        assert worst[1] < worst[0]
        assert worst[1] < 0.01

    def test_the_mean_stays_the_mean(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, balance="mean")
        images = photographs(64)
        ermoe.calibrate(sparse, [images])
        for name, seen in routings(sparse, images).items():
            mean = torch.cat([r.score_TE for r in seen]).mean(0)
            assert torch.allclose(sparse.get_submodule(name).router.balance.offset_E, -mean, atol=1e-5)

    def test_a_small_sample_does(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
        report = ermoe.calibrate(sparse, [photographs(64, 64)], max_tokens=500)
        assert report["blocks.1.mlp"].num_tokens == 29 * 17

    def test_the_threshold_travels_with_the_weights(self, tmp_path):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, below_threshold="prune")
        ermoe.calibrate(sparse, [photographs(64)], budget=1.3)
        thresholds = [block.mlp.router.threshold for block in sparse.blocks[1::2]]
        assert 0.5 not in thresholds
        ermoe.save(sparse, tmp_path)
        assert [block.mlp.router.threshold for block in ermoe.load(tmp_path).blocks[1::2]] == thresholds

    def test_the_capacity_travels_with_the_weights(self, tmp_path):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
        ermoe.calibrate(sparse, [photographs(64)], capacity_factor=0.5)
        ermoe.save(sparse, tmp_path)
        loaded = ermoe.load(tmp_path).eval()
        assert [block.mlp.router.capacity_factor for block in loaded.blocks[1::2]] == [0.5] * 3
        assert torch.equal(outputs(loaded, photographs(64)), outputs(sparse.eval(), photographs(64)))

    def test_weights_that_hold_the_threshold_alone_leave_the_capacity(self):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, capacity_factor=2.0)
        state = sparse.state_dict()
        router = sparse.blocks[1].mlp.router
        state["blocks.1.mlp.router._extra_state"] = torch.tensor(0.25, dtype=torch.float64)
        load_state(sparse, state, path="an earlier file")
        assert (router.threshold, router.capacity_factor, router.score.route_rank) == (0.25, 2.0, 16)

    def test_fewest_drops_at_a_fixed_capacity(self):
        """Against the slow twin: thresholds of a grid, each with its own offsets, measured by running the model."""
        images = photographs(64, 64)

        def drop_rate(threshold):
            sparse = ermoe.upcycle(dense, num_experts=4, below_threshold="prune", threshold=threshold)
            ermoe.calibrate(sparse, [images])
            for block in sparse.blocks[1::2]:
                block.mlp.router.capacity_factor = 0.8
            seen = routings(sparse, images)["blocks.1.mlp"]
            dropped = sum(int(r.num_dropped) for r in seen)
            return dropped / (dropped + sum(int(r.count_E.sum()) for r in seen))

        dense, _ = build("test_vit")
        sparse = ermoe.upcycle(dense, num_experts=4, below_threshold="prune")
        report = ermoe.calibrate(sparse, [images], capacity_factor=0.8)
        assert sparse.blocks[1].mlp.router.capacity_factor == 0.8
        assert report["blocks.1.mlp"].drop_rate <= min(drop_rate(t) for t in (0.0, 0.3, 0.6, 0.9)) + 0.005

    @pytest.mark.parametrize(
        ("sparsity", "options", "message"),
        [
            ({"balance": "none"}, {}, "nothing to calibrate"),
            ({}, {"budget": 1.5}, "below_threshold='prune'"),
            ({"below_threshold": "prune"}, {"budget": 2.5}, "1 <= budget <= top_k=2"),
            ({}, {"rounds": 0}, "rounds=0: need at least one pass"),
            ({}, {"capacity_factor": 0}, "capacity_factor=0: use a positive number"),
            ({}, {"capacity_factor": -1.0}, "capacity_factor=-1.0: use a positive number"),
        ],
    )
    def test_what_makes_no_sense_is_refused(self, sparsity, options, message):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, **sparsity)
        with pytest.raises(ValueError, match=message):
            ermoe.calibrate(sparse, [photographs(64)], **options)

    @pytest.mark.parametrize("score", ["eigenbasis", "energy"])
    def test_images_that_are_no_numbers_are_refused(self, score):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4, score=score)
        images = photographs(64).clone()
        images[3, 0, 5, 5] = torch.nan
        with pytest.raises(ValueError, match="a batch holds NaN"):
            ermoe.calibrate(sparse, [photographs(64), images])

    @pytest.mark.parametrize("rounds", [1, 2])
    def test_one_batch_is_no_list_of_batches(self, rounds):
        sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
        with pytest.raises(ValueError, match=r"one tensor of shape \(8, 3, 64, 64\): pass a list of batches"):
            ermoe.calibrate(sparse, photographs(64), rounds=rounds)

    def test_no_batches_are_refused(self):
        with pytest.raises(ValueError, match="no batches"):
            ermoe.calibrate(ermoe.upcycle(build("test_vit")[0]), iter([]))

    def test_batches_may_be_what_a_loader_yields(self):
        dense, size = build("hugging face")
        sparse = ermoe.upcycle(dense, num_experts=4)
        images = photographs(size)
        kinds = [images, [images, torch.zeros(8)], {"pixel_values": images}]
        reports = [ermoe.calibrate(sparse, [batch])["vit.layers.1.mlp"] for batch in kinds]
        assert reports[0] == reports[1] == reports[2]
        with pytest.raises(ValueError, match="a batch is a str"):
            ermoe.calibrate(sparse, ["images"])


@pytest.mark.no_cover
class TestOnCifar:
    """Point by point what must hold at step 0, on real images."""

    @pytest.fixture(params=["fresh", "trained"])
    def dense(self, request):
        if request.param == "trained":
            return request.getfixturevalue("trained_vit")
        import timm

        torch.manual_seed(0)
        small = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3, "num_classes": 10}
        return timm.create_model("vit_tiny_patch16_224", **small).eval()

    def test_routing_discriminates_at_once(self, dense, cifar):
        sparse = ermoe.upcycle(dense)
        images, _ = cifar("test", slice(0, 256))
        for name, seen in routings(sparse, images).items():
            spread = torch.cat([r.score_TE.amax(1) - r.score_TE.amin(1) for r in seen]).mean()
            assert float(spread) > 0.05, name
            assert int(sum(r.count_E for r in seen).min()) > 0, name

    def test_loads_are_equal_on_images_not_calibrated_on(self, dense, cifar):
        sparse = ermoe.upcycle(dense)
        seen, unseen = cifar("test", slice(0, 256))[0], cifar("test", slice(256, 512))[0]
        ermoe.calibrate(sparse, seen.split(128))
        for name, count_E in loads(sparse, unseen).items():
            assert load_cv2(count_E) <= 0.05, name

    def test_a_budget_is_met_on_images_not_calibrated_on(self, dense, cifar):
        sparse = ermoe.upcycle(dense, below_threshold="prune")
        seen, unseen = cifar("test", slice(0, 256))[0], cifar("test", slice(256, 512))[0]
        ermoe.calibrate(sparse, seen.split(128), budget=1.5)
        for name, routing in routings(sparse, unseen).items():
            experts = sum(int(r.count_E.sum()) for r in routing) / sum(r.num_tokens for r in routing)
            assert experts == pytest.approx(1.5, abs=0.05), name
