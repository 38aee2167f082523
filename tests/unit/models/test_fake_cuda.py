"""Every family of models on a GPU that is not there, with its losses, a recording and merged weights."""

import pytest
import torch
from torch import nn

import ermoe
from support.backbones import build
from support.fake_cuda import fake_cuda

pytestmark = pytest.mark.no_cover  # the same lines run on the CPU elsewhere

BACKBONES = ["test_vit", "vit_small_patch16_dinov3", "torchvision", "hugging face"]


def forward(model, *inputs):
    outputs = model(*inputs)
    outputs = outputs if isinstance(outputs, torch.Tensor) else outputs.logits
    assert outputs.device.type == "cuda"
    return outputs


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("router", ["eigen", "v-moe"])
@pytest.mark.parametrize("name", BACKBONES)
def test_upcycled(name, router, training):
    dense, size = build(name)
    # Without a limit at inference and in training nobody is left out, and nothing waits for how many are left.
    options = {"capacity_factor": None} if router == "v-moe" else {}
    sparse = ermoe.upcycle(dense, num_experts=4, router=router, **options).train(training)
    with fake_cuda(sparse):
        outputs = forward(sparse, torch.randn(2, 3, size, size, device="cuda"))
        loss = outputs.sum() + ermoe.auxiliary_loss(sparse) + ermoe.orthogonality_loss(sparse)
        assert loss.device.type == "cuda"
        ermoe.update_balance(sparse)


@pytest.mark.parametrize("name", BACKBONES)
def test_merged(name):
    dense, size = build(name)
    merged = ermoe.merge(ermoe.upcycle(dense, num_experts=4))
    with fake_cuda(merged):
        forward(merged, torch.randn(2, 3, size, size, device="cuda"))


def test_merging_on_the_gpu():
    sparse = ermoe.upcycle(build("test_vit")[0], num_experts=4)
    with fake_cuda(sparse):
        ermoe.merge(sparse, inplace=True)
        assert {parameter.device.type for parameter in sparse.parameters()} == {"cuda"}
        forward(sparse, torch.randn(2, 3, 64, 64, device="cuda"))


@pytest.mark.parametrize("masked", [False, True])
def test_volumes(masked):
    """With a mask, a layer waits once for the number of real tokens."""
    model = ermoe.ViT3D((16, 16, 16), patch_size=8, embed_dim=32, depth=2, num_heads=4)
    sparse = ermoe.upcycle(model, num_experts=4, score="prototype", init="random")
    with fake_cuda(sparse, may_wait=masked):
        mask = torch.ones(2, 16, 16, 16, dtype=torch.bool, device="cuda") if masked else None
        forward(sparse, torch.randn(2, 1, 16, 16, 16, device="cuda"), mask)


@pytest.mark.parametrize("classes", [None, 3])
def test_recording_waits_for_nothing(classes):
    model = nn.Sequential(
        ermoe.EigenMoE(16, num_experts=4, score="energy"),
        ermoe.build_layer("expert-choice", 16, num_experts=4),
        ermoe.build_layer("soft", 16, num_experts=4),
    )
    with fake_cuda(model), ermoe.record_routing(model, classes=classes) as routing:
        if classes:
            routing.labels(torch.zeros(2, dtype=torch.long, device="cuda"))
        forward(model, torch.randn(2, 10, 16, device="cuda"))
        assert {tally.totals.count_E.device.type for tally in routing.tallies.values()} == {"cuda"}
