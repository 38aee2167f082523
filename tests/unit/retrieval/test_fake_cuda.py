"""Towers, losses and encoders on a GPU that is only imagined: nothing is left on the CPU, and nothing waits for it.

Fake tensors know their device and shape, and raise where two devices meet or where a value would have to be fetched.
"""

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ermoe.data.images import ImagesInMemory
from ermoe.retrieval import encode
from ermoe.retrieval.clip.towers import tokenise
from ermoe.retrieval.contrastive import OBJECTIVES, contrastive_loss
from ermoe.retrieval.presets import recipe
from ermoe.train.compute import Compute, Processes

CUDA = torch.device("cuda", 0)
TOWERS = ("tiny-dense", "tiny-ermoe", "tiny-ermoe-none", "tiny-long-clip", "tiny-fix-clip-style")

# No graph, and no pretended tensor, holds grouped products in float32 before that.
pytestmark = pytest.mark.skipif(torch.__version__ < (2, 15), reason="needs torch 2.15")


@pytest.fixture
def fake_gpu():
    """A mode in which models move to a GPU and compute there."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    yield FakeTensorMode(allow_non_fake_inputs=True)
    torch.__future__.set_overwrite_module_params_on_conversion(before)


def moved(model, mode):
    with mode:
        return model.to(CUDA).eval()


@pytest.mark.parametrize("name", TOWERS)
def test_towers_and_their_loss_stay_on_the_device(fake_gpu, name):
    chosen = recipe(name)
    objective, model = OBJECTIVES[chosen.variant], moved(chosen.build(), fake_gpu)
    fake_gpu.allow_non_fake_inputs = False
    with fake_gpu, torch.no_grad():
        texts = 8 if objective.needs_long else 4
        tokens = torch.ones(texts, model.context_length, dtype=torch.long, device=CUDA)
        image, text, scale = model(torch.randn(4, 3, 32, 32, device=CUDA), tokens)
        image = torch.cat([image, image]) if objective.masked_share else image
        for one, other in objective.pairs(image, text):
            loss = contrastive_loss(one, other, scale, label_smoothing=0.1)
            assert loss.device == CUDA
            assert loss.shape == ()


@pytest.mark.parametrize("compute", [None, Compute(Processes(device=CUDA))])
def test_encoders_compute_on_the_model_s_device_and_answer_on_the_cpu(fake_gpu, monkeypatch, compute):
    model = moved(recipe("tiny-ermoe").build(), fake_gpu)
    pixels = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
    images = ImagesInMemory(pixels, summary="five", split="all", classes=["a", "b"], label_N=torch.zeros(5).long())
    tokens = tokenise(["a dog", "two dogs on a beach", "a boat"], model.context_length).id_TL
    seen = []
    monkeypatch.setattr(encode, "trim", lambda text_BL: text_BL)  # which asks the tokens, on the CPU, for their length
    for tower in (model.visual, model.text):
        tower.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].device))
    with fake_gpu:
        found = encode.encode_images(model, images, batch_size=2, compute=compute)
        texts = encode.encode_tokens(model, tokens, batch_size=2, compute=compute)
    assert seen == [CUDA] * 5
    assert (found.shape, texts.shape) == ((5, 32), (3, 32))
    assert {found.device.type, texts.device.type} == {"cpu"}


def test_a_part_that_is_left_on_the_cpu_is_noticed(fake_gpu):
    model = moved(recipe("tiny-dense").build(), fake_gpu)
    model.text.positional_embedding = torch.nn.Parameter(torch.zeros(16, 32))
    with fake_gpu, torch.no_grad(), pytest.raises(RuntimeError, match="device"):
        model.encode_text(torch.from_numpy(np.ones((2, 16), np.int64)).to(CUDA))
