"""Cards beside loops over every patch."""

import numpy as np
import pytest
import torch

from ermoe.data.images import open_images
from ermoe.explorer.card_page import card_markup
from ermoe.explorer.cards import PATCHES, Cards, Neighbours, attributes
from ermoe.images.run import transform_for
from ermoe.nn import moe_layers
from support.inspected import model

NUMBER = 40


@pytest.fixture(scope="module")
def counted():
    """Cards of 40 digits in two batches, and everything each patch did, (N, P, E)."""
    network, images = model(), open_images("digits", "test")
    transform, cards, seen = transform_for(network), Cards(network, (4, 4), images.classes), []
    network.blocks[1].mlp.observers.append(seen.append)
    for rows in np.split(np.arange(NUMBER), 2):
        pixels = transform.host(images, rows, 0)
        batch = transform.device(pixels, images.label_N[rows], rows, 0)
        assert torch.equal(transform.pixels(batch.image), pixels)
        cards.add(batch, pixels)
    score, weight = (
        torch.cat([value.view(20, 17, 4)[:, 1:] for value in values])
        for values in ([r.score_TE for r in seen], [r.dense_weights() for r in seen])
    )
    return cards, score, weight, images.label_N[:NUMBER]


def test_load_classes_and_places_equal_loops(counted):
    cards, _, weight, label = counted
    used = weight > 0
    for expert in range(4):
        card = cards.card("blocks.1.mlp", expert)
        assert card.load == pytest.approx(int(used[..., expert].sum()) / int(used.sum()))
        assert card.weight == pytest.approx(float(weight[..., expert].sum() / weight.sum()), rel=1e-5)
        for name, share in card.classes:
            own = used[label == int(name)]
            assert share == pytest.approx(int(own[..., expert].sum()) / int(own.sum()))
        assert [share for _, share in card.classes] == sorted([share for _, share in card.classes], reverse=True)
        for patch in range(16):
            here = used[:, patch]
            assert float(card.places[""].flatten()[patch]) == pytest.approx(
                int(here[:, expert].sum()) / int(here.sum())
            )


def test_best_patches_are_the_best_of_each_image(counted):
    cards, score, _, _ = counted
    card = cards.card("blocks.1.mlp", 2)
    best_N = score[..., 2].amax(1)
    order = best_N.argsort(descending=True)[:PATCHES].tolist()
    assert [found.image for found in card.best] == order
    for found in card.best:
        assert found.score == float(score[found.image, found.patch, 2]) == float(best_N[found.image])


def test_what_is_no_information_is_no_more_than_shuffled():
    """Choices that know nothing of classes and places are as far from even as shuffled ones are."""
    network, images = model(score="logit"), open_images("digits", "test")
    with torch.no_grad():
        for layer in (network.blocks[1].mlp, network.blocks[3].mlp):
            layer.router.score.gate.W.zero_()  # all scores equal: ties go to the lower ids
    transform, cards = transform_for(network), Cards(network, (4, 4), images.classes)
    rows = np.arange(30)
    pixels = transform.host(images, rows, 0)
    cards.add(transform.device(pixels, images.label_N[rows], rows, 0), pixels)
    card = cards.card("blocks.1.mlp", 0)
    assert card.load == 0.5
    assert card.class_bits == pytest.approx((0, 0), abs=1e-9)
    assert card.place_bits == pytest.approx((0, 0), abs=1e-9)
    assert all(own == pytest.approx(0, abs=1e-6) for own, _ in card.looks.values())
    assert card.neighbours == []
    assert cards.card("blocks.1.mlp", 3).load == 0


def test_attributes_see_what_they_are_called_after():
    pixels = torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    pixels[:, 0, :4, :4] = 255  # a red corner
    pixels[:, :, 4:, ::2] = 255  # stripes below
    brightness, contrast, saturation, warmth, distance = attributes(pixels, (2, 2))[0].T
    assert brightness.tolist() == pytest.approx([1 / 3, 0, 0.5, 0.5])
    assert contrast.tolist() == pytest.approx([0, 0, 0.5, 0.5], abs=1e-3)
    assert saturation[0] == warmth[0] == 1
    assert distance.unique().numel() == 1


def test_nearest_experts_and_a_card_that_escapes(counted):
    cards = counted[0]
    card = cards.card("blocks.1.mlp", 0)
    assert [e for e, _, _ in card.neighbours] != []
    assert all(0 <= overlap <= 1 and 0 <= angle <= 90 for _, overlap, angle in card.neighbours)
    shared = model(score="prototype", routing_basis="shared")
    assert len(Neighbours(moe_layers(shared)).of("blocks.1.mlp", 0)) == 3
    cards.classes = ["<b>"] * 10
    assert "<b>&lt;b&gt;" not in card_markup(cards.card("blocks.1.mlp", 0), "<i>")
    assert "<i>" not in card_markup(cards.card("blocks.1.mlp", 0), "<i>")
