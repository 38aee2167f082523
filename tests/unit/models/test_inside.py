"""A backbone inside another module is found, converted where it is, and named."""

import logging

import pytest
import timm
import torch
from torch import nn

import ermoe
from ermoe.models.backbones import SparseBlock
from support.backbones import build, distance, outputs, photographs
from support.refusals import END, REFUSALS, START, sentence, table


class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = build("test_vit")[0], nn.Linear(10, 3)
        self.same = nn.ModuleList([self.encoder])  # under two names, and still one

    def forward(self, x):
        return self.head(self.encoder(x))


class TestModules:
    def test_it_is_found_and_named(self, caplog, tmp_path):
        model = Mine()
        with caplog.at_level(logging.WARNING, logger="ermoe"):
            sparse = ermoe.upcycle(model, num_experts=2)
        assert "experts go into encoder, the VisionTransformer of this Mine" in caplog.text
        assert isinstance(sparse.encoder.blocks[1], SparseBlock)
        assert not isinstance(model.encoder.blocks[1], SparseBlock)
        assert distance(outputs(sparse, photographs(64)), outputs(model, photographs(64))) <= 1e-4
        with pytest.raises(ValueError, match=r"ermoe\.save\(model\.encoder, folder\)"):
            ermoe.save(sparse, tmp_path)
        ermoe.save(sparse.encoder, tmp_path)
        assert torch.equal(
            outputs(ermoe.load(tmp_path).eval(), photographs(64)), outputs(sparse.encoder, photographs(64))
        )

    def test_in_place_and_back(self):
        model = Mine()
        before = outputs(model, photographs(64))
        assert ermoe.upcycle(model, num_experts=2, inplace=True) is model
        assert ermoe.count(model, 64).multiply_adds.experts > 0
        ermoe.calibrate(model, [photographs(64)])
        assert distance(outputs(ermoe.to_dense(model), photographs(64)), before) <= 1e-4

    def test_merging_marks_what_is_inside(self):
        sparse = ermoe.merge(ermoe.upcycle(Mine(), num_experts=2))
        assert sparse.encoder.sparsity.merged


class TestRunAnotherWay:
    @pytest.mark.parametrize(
        ("wrap", "again"),
        [(nn.DataParallel, "wrap it"), (lambda model: torch.compile(model, backend="eager"), "compile it")],
    )
    def test_it_is_taken_off(self, wrap, again, caplog):
        dense = build("test_vit")[0]
        with caplog.at_level(logging.WARNING, logger="ermoe"):
            sparse = ermoe.upcycle(wrap(dense), num_experts=2)
        assert type(sparse) is type(dense)
        assert again in caplog.text
        assert distance(outputs(sparse, photographs(64)), outputs(dense, photographs(64))) <= 1e-4


@pytest.fixture(scope="module")
def sentences():
    return {name: sentence(name) for name in REFUSALS}


def test_what_would_change_without_a_word_is_refused(sentences):
    assert all(said != "nothing" and "\n" not in said for said in sentences.values()), sentences


def test_the_documentation_says_the_same(sentences, request):
    page = (request.config.rootpath / "docs/reference/backbones.md").read_text(encoding="utf-8")
    written = START + page.partition(START)[2].partition(END)[0] + END
    assert written == table(sentences), "python tests/support/refusals.py docs/reference/backbones.md writes it anew"


@pytest.mark.parametrize("part", ["", "norm2", "attn.proj"])
def test_hooks_elsewhere_stay(part):
    dense, called = build("test_vit")[0], []
    dense.blocks[3].get_submodule(part).register_forward_hook(lambda *args: called.append(part))
    outputs(ermoe.upcycle(dense, num_experts=2), photographs(64))
    assert called == [part]


def test_attention_may_have_hooks_where_no_context_is_needed():
    dense = timm.create_model("test_vit", img_size=64)
    dense.blocks[3].attn.register_forward_hook(lambda *args: None)
    assert ermoe.upcycle(dense, num_experts=2, score="prototype").sparsity.blocks == (1, 3, 5)
