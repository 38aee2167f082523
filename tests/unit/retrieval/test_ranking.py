"""Tiled ranks equal the dense ones exactly, ties included; a collapsed encoder gains nothing."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ermoe.errors import UserError
from ermoe.retrieval.figures import CUTS, RECALLS, TIES, rank, retrieve
from support.slow_ranks import as_lists, grouped, slow_rank

GOLDEN = Path(os.environ.get("ERMOE_DATA", "")) / "golden"
needs_data = pytest.mark.skipif("ERMOE_DATA" not in os.environ, reason="set ERMOE_DATA to the folder of test data")


def both_ways(image_ID, text_TD, owner_T):
    image_I = torch.arange(len(image_ID))
    return (image_ID, text_TD, image_I, owner_T), (text_TD, image_ID, owner_T, image_I)


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), num_images=st.integers(2, 17), width=st.integers(1, 5), rows=st.integers(1, 9))
def test_strips_of_any_size_equal_the_dense_twin_on_integers_full_of_ties(seed, num_images, width, rows):
    generator = torch.Generator().manual_seed(seed)
    owner_T = grouped(num_images, generator)
    image_ID, text_TD = (
        torch.randint(-2, 3, (count, width), generator=generator).float() for count in (num_images, len(owner_T))
    )
    for case in both_ways(image_ID, text_TD, owner_T):
        ranks = rank(*case, strip_bytes=4 * len(case[1]) * rows)
        assert as_lists(ranks) == slow_rank(*case)


def test_real_features_equal_the_dense_twin_outside_of_near_ties():
    generator = torch.Generator().manual_seed(3)
    owner_T = grouped(60, generator)
    image_ID, text_TD = (
        torch.nn.functional.normalize(torch.randn(count, 16, generator=generator), dim=-1)
        for count in (60, len(owner_T))
    )
    for case in both_ways(image_ID, text_TD, owner_T):
        wide = (case[0].double(), case[1].double(), *case[2:])
        score_QC = wide[0] @ wide[1].mT
        right_QC = case[2].unsqueeze(1) == case[3]
        best_Q1 = score_QC.masked_fill(~right_QC, -9).amax(1, keepdim=True)
        clear_Q = ((score_QC - best_Q1).abs().masked_fill(right_QC, 9) > 1e-6).all(1)
        assert clear_Q.sum() > len(clear_Q) // 2
        ours, reference = rank(*case, strip_bytes=4096).above_Q, torch.tensor(slow_rank(*wide)[0])
        assert torch.equal(ours[clear_Q], reference[clear_Q])


def test_a_right_candidate_never_loses_to_itself():
    """Copies of one text are all right, or tied: whatever the order of summation, no copy stands above another."""
    generator = torch.Generator().manual_seed(0)
    text_TD = torch.nn.functional.normalize(torch.randn(37, 129, generator=generator), dim=-1)
    image_ID = text_TD.clone()
    ranks = rank(image_ID, text_TD, torch.arange(37), torch.arange(37), strip_bytes=4 * 37 * 5)
    assert not ranks.above_Q.any()


@pytest.mark.parametrize("num_images", [7, 64, 101])
@pytest.mark.parametrize("captions", [1, 5])
def test_a_collapsed_encoder_never_beats_chance(num_images, captions):
    vector_D = torch.nn.functional.normalize(torch.randn(513, generator=torch.Generator().manual_seed(1)), dim=-1)
    owner_T = torch.arange(num_images).repeat_interleave(captions)
    both = retrieve(vector_D.repeat(num_images, 1), vector_D.repeat(len(owner_T), 1), owner_T)
    figures = both.figures()
    for k in CUTS:
        assert figures[f"i2t_r{k}"] <= k / num_images
        assert figures[f"t2i_r{k}"] <= k / num_images
    assert both.figures("for")["t2i_r1"] == 1.0, "which is why ties must not count in favour"
    assert both.num_tied == num_images + len(owner_T)
    assert set(both.other_ties()) == {"middle", "for"}


def test_the_variants_of_ties_are_ordered_and_agree_without_ties():
    generator = torch.Generator().manual_seed(0)
    owner_T = grouped(20, generator)
    image_ID, text_TD = (torch.randint(-1, 2, (n, 3), generator=generator).float() for n in (20, len(owner_T)))
    tied = retrieve(image_ID, text_TD, owner_T).image_to_text
    against, middle, favourable, first = (tied.zero_based(ties) for ties in TIES)
    assert (favourable <= middle).all()
    assert (middle <= against).all()
    assert (favourable <= first).all()
    assert (first <= against).all()
    free = retrieve(torch.randn(9, 8, generator=generator), torch.randn(9, 8, generator=generator), torch.arange(9))
    assert free.num_tied == 0
    assert free.other_ties() == {}


@needs_data
@pytest.mark.parametrize("prefix", ["", "notie_"])
def test_ranks_and_metrics_of_open_clip_with_its_own_rule_for_ties(prefix):
    golden = np.load(GOLDEN / "clip_retrieval_A.npz")
    image_ID, text_TD = (torch.from_numpy(golden[f"{prefix}{name}_features"]) for name in ("image", "text"))
    both = retrieve(float(golden["logit_scale"]) * image_ID, text_TD, torch.arange(len(image_ID)))
    directions = {"image_to_text": both.image_to_text, "text_to_image": both.text_to_image}
    for direction, ranks in directions.items():
        rank_Q = ranks.zero_based("first")
        if not prefix:
            short = "i2t" if direction == "image_to_text" else "t2i"
            assert rank_Q.long().tolist() == golden[f"{short}_rank"].tolist()
        expected = {name: float(golden[f"{prefix}metric_{direction}_{name}_f64"]) for name in ("R1", "R5", "R10")}
        assert {f"R{k}": float(ranks.found_within(k, "first").double().mean()) for k in CUTS} == expected
        assert float(rank_Q.mean()) + 1 == pytest.approx(float(golden[f"{prefix}metric_{direction}_mean_rank_f64"]))
        median = np.floor(np.median(rank_Q.numpy())) + 1
        assert median == float(golden[f"{prefix}metric_{direction}_median_rank_f64"])


def test_half_precision_is_widened_and_shortcuts_are_switched_off():
    generator = torch.Generator().manual_seed(0)
    feature = torch.nn.functional.normalize(torch.randn(50, 64, generator=generator), dim=-1).bfloat16()
    before = torch.get_float32_matmul_precision()
    ranks = rank(feature, feature, torch.arange(50), torch.arange(50))
    wide = rank(feature.float(), feature.float(), torch.arange(50), torch.arange(50))
    assert as_lists(ranks) == as_lists(wide)
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"query": torch.full((2, 3), torch.nan)}, "NaN or infinity"),
        ({"query": torch.ones(2, 4)}, "widths must be equal"),
        ({"query_group": torch.arange(3)}, "need one each"),
        ({"query_group": torch.tensor([0, 9])}, "image 9 has no right candidate"),
    ],
)
def test_what_cannot_be_ranked_is_refused(change, complaint):
    case = {"query": torch.ones(2, 3), "candidate": torch.ones(2, 3), "query_group": torch.arange(2)} | change
    with pytest.raises(UserError, match=complaint):
        rank(case["query"], case["candidate"], case["query_group"], torch.arange(2))


def test_figures_by_hand():
    """Image 0 has texts 0 and 1, image 1 has text 2."""
    image_ID = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    text_TD = torch.tensor([[0.0, 1.0], [0.6, 0.8], [0.8, 0.6]])
    figures = retrieve(image_ID, text_TD, torch.tensor([0, 0, 1])).figures()
    assert figures["i2t_r1"] == 0.0
    assert figures["t2i_r1"] == 0.0
    assert figures["i2t_r5"] == figures["t2i_r5"] == 1.0
    # Image 0: text 2 (0.8) stands above text 1 (0.6). Image 1: texts 0 and 1 stand above text 2.
    assert figures["i2t_median_rank"] == 2.5
    assert figures["t2i_median_rank"] == 2.0
    assert figures["rsum"] == 400.0


def test_intervals_draw_images_with_their_captions():
    generator = torch.Generator().manual_seed(0)
    owner_T = torch.arange(200).repeat_interleave(5)
    image_ID = torch.nn.functional.normalize(torch.randn(200, 8, generator=generator), dim=-1)
    noise = torch.randn(200, 8, generator=generator).repeat_interleave(5, 0)  # captions of an image agree
    both = retrieve(image_ID, torch.nn.functional.normalize(image_ID[owner_T] + 0.4 * noise, dim=-1), owner_T)
    intervals, figures = both.intervals(draws=300), both.figures()
    for name in (*RECALLS, "rsum"):
        low, high = intervals[name]
        assert low <= figures[name] <= high
    share = figures["t2i_r1"]
    width = intervals["t2i_r1"][1] - intervals["t2i_r1"][0]
    by_image, by_caption = (2 * 1.96 * (share * (1 - share) / n) ** 0.5 for n in (200, 1000))
    assert abs(width - by_image) < abs(width - by_caption), "captions of an image are one observation, not five"
    assert both.intervals(draws=50, seed=1) == both.intervals(draws=50, seed=1)


def test_chance_is_that_of_a_random_order():
    generator = torch.Generator().manual_seed(0)
    owner_T = grouped(12, generator)
    both = [
        retrieve(torch.randn(12, 40, generator=generator), torch.randn(len(owner_T), 40, generator=generator), owner_T)
        for _ in range(150)
    ]
    for side, direction in enumerate(("i2t", "t2i")):
        mean = np.mean([found.figures()[f"{direction}_r5"] for found in both])
        assert mean == pytest.approx(both[0].chance(5)[side], abs=0.03)
