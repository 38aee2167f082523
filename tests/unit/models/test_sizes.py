"""Which sizes are chosen: by what they do to the answers, on images that were kept apart."""

import pytest
import timm
import torch

from ermoe.models import sizes
from ermoe.models.backbones import family_of
from ermoe.models.tokens import sample_tokens


@pytest.fixture(scope="module")
def dense():
    torch.manual_seed(0)
    model = timm.create_model("test_vit", num_classes=10, img_size=96).eval()
    torch.nn.init.normal_(model.head.weight, std=0.5)  # an untrained head answers everything alike
    return model


@pytest.fixture(scope="module")
def batches():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, 96, 96, generator=generator) for _ in range(6)]


@pytest.fixture(scope="module")
def block(dense):
    return dense.blocks[2], family_of(dense).ffn(dense.blocks[2])


def test_some_batches_are_kept_apart_and_not_fitted_to(batches):
    apart = []
    kept = list(sizes._kept_apart(batches, apart))
    assert [len(kept), len(apart)] == [5, 1]
    assert apart[0] is batches[4]
    apart = []
    assert list(sizes._kept_apart(batches[:2], apart)) == batches[:2]
    assert apart == batches[:1]


def test_answers_stay_with_the_blocks_own_network_and_change_without_it(dense, batches, block):
    answers = sizes._Answers(dense, batches[:2])
    assert answers.divergence(*block, block[1]) == pytest.approx(0, abs=1e-9)
    without = answers.divergence(*block, torch.zeros_like)
    with torch.no_grad():
        wanted = dense(torch.cat(batches[:2])).double().log_softmax(1)
        down = dense.blocks[2].mlp.fc2
        before = [parameter.clone() for parameter in down.parameters()]
        for parameter in down.parameters():
            parameter.zero_()
        found = dense(torch.cat(batches[:2])).double().log_softmax(1)
        for parameter, old in zip(down.parameters(), before, strict=True):
            parameter.copy_(old)
    assert without == pytest.approx(float((wanted.exp() * (wanted - found)).sum(1).mean()), rel=1e-4)


@pytest.mark.parametrize(("cut", "routed"), [("width", 1.0), ("width", 0.125), ("rank", 1.0)])
def test_estimates_are_brought_to_what_is_measured(dense, batches, block, cut, routed):
    kind = sizes.Kind(2, cut, routed)
    answers = sizes._Answers(dense, batches[4:])
    tokens = sample_tokens(dense, {"2": block}, batches[:4])["2"]
    harm = sizes._harm(answers, *block, tokens, kind)
    for step in sizes._MEASURED_AT:
        size = kind.size(block[1], sizes._steps(block[1], cut)[step - 1])
        measured = answers.divergence(*block, sizes._mixture(block[1], tokens, size, cut))
        assert harm[size] == pytest.approx(measured, rel=1e-3)
    assert all(value >= 0 for value in harm.values())


def test_between_two_factors_lies_a_line_of_logarithms():
    factors = {10: 1.0, 30: 100.0}
    assert [sizes._between(factors, kept) for kept in (5, 10, 20, 30, 40)] == pytest.approx([1, 1, 10, 100, 100])
    assert sizes._between({7: 3.0}, 2) == pytest.approx(3)
