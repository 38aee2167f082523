"""A whole model under torch.compile."""

import timm
import torch

from support.backbones import distance, outputs, photographs


def test_it_compiles():
    torch.manual_seed(0)
    model = timm.create_model("test_ermoe_vit2", num_classes=10, depth=4).eval()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert distance(outputs(compiled, photographs(96)), outputs(model, photographs(96))) < 1e-4
