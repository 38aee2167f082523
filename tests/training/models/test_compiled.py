"""A whole model under torch.compile."""

import pytest
import timm
import torch

import ermoe.models.vit  # noqa: F401 (its models are known to timm by name)
from support.backbones import distance, outputs, photographs

pytestmark = pytest.mark.no_cover  # lines that torch traces are not run, and tracing takes twice as long when watched


def test_it_compiles():
    torch.manual_seed(0)
    model = timm.create_model("test_ermoe_vit2", num_classes=10, depth=4).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert distance(outputs(compiled, photographs(96)), outputs(model, photographs(96))) < 1e-4
