"""Models of Hugging Face and open_clip, whatever head is on them: made sparse, trained, saved, counted."""

import copy
import json

import pytest
import torch

import ermoe
from ermoe.errors import UserError
from ermoe.models.backbones import family_of
from ermoe.models.upcycle import restart_ffns
from support.backbones import apart, distance, perturb
from support.towers import HUGGING_FACE, NAMES, tensors, tower


def perturbed(name):
    torch.manual_seed(0)
    model, inputs = tower(name)
    return perturb(model).eval(), inputs


def says(model, inputs):
    """What a model says to the same inputs and dice; of padded tokens, nothing."""
    torch.manual_seed(1)
    said = tensors(model(**inputs))
    real = inputs.get("pixel_attention_mask")
    for name, tensor in said.items():
        if real is not None and name.endswith("last_hidden_state") and tensor.shape[:2] == real.shape:
            said[name] = tensor[real.bool()]
    return {name: tensor for name, tensor in said.items() if tensor.numel() > 1}


@pytest.mark.parametrize("name", NAMES)
def test_outputs_gradients_and_files(name, tmp_path):
    dense, inputs = perturbed(name)
    if name == "ViTMAEModel":
        dense.set_attn_implementation("eager")  # which comes back as it was
    sparse = ermoe.upcycle(dense, num_experts=4, blocks="all")
    with torch.no_grad():
        for mode in (True, False):  # dropout and stochastic depth too
            before, after = says(dense.train(mode), inputs), says(sparse.train(mode), inputs)
            assert before.keys() == after.keys()
            for key, tensor in before.items():
                assert distance(after[key], tensor) <= 1e-4, key
                assert torch.equal(after[key].argmax(-1), tensor.argmax(-1)), key
        ermoe.save(sparse, tmp_path)
        loaded = says(ermoe.load(tmp_path).eval(), inputs)
        assert all(torch.equal(loaded[key], tensor) for key, tensor in after.items())
    with_gradients = (tensor for tensor in says(sparse, inputs).values() if tensor.requires_grad)
    sum(tensor.square().sum() + tensor.sum() for tensor in with_gradients).backward()
    learned = {name for name, parameter in sparse.named_parameters() if parameter.grad is not None}
    experts = {name for name, _ in sparse.named_parameters() if ".experts." in name}
    assert experts
    assert experts <= learned


@pytest.mark.parametrize("name", ["BeitForImageClassification", "DINOv3ViTModel", "Siglip2Model", "CLIPVisionModel"])
def test_the_context_is_that_of_the_models_own_attention(name):
    """Experts that differ answer alike only if tokens meet the same ones: eager attention shows its own weights."""
    dense, inputs = perturbed(name)
    sparse = apart(ermoe.upcycle(dense, num_experts=4, blocks="all"), scale=0.2)
    said = []
    for implementation in ("eager", "sdpa"):
        sparse.set_attn_implementation(implementation)
        with torch.no_grad():
            said.append(says(sparse, inputs))
    assert all(distance(said[0][key], tensor) < 1e-4 for key, tensor in said[1].items())


@pytest.mark.parametrize("name", ["CLIPModel", "Siglip2ForImageClassification", "plain", "timm"])
def test_images_alone_are_enough_to_count_and_calibrate(name):
    dense, inputs = perturbed(name)
    sparse = ermoe.upcycle(dense, num_experts=4, blocks=[1])
    images = torch.randn(2, 3, *family_of(sparse).image_size(sparse))
    flops = ermoe.count(sparse).flops
    assert min(flops.embedding, flops.attention, flops.context, flops.experts) > 0
    (layer,) = ermoe.calibrate(sparse, [images], rounds=1).values()
    assert layer.num_tokens == 2 * family_of(sparse).num_tokens(sparse)
    assert ermoe.calibrate(sparse, [inputs], rounds=1)
    again = ermoe.to_dense(ermoe.merge(sparse))
    assert again.state_dict().keys() == dense.state_dict().keys()
    assert ermoe.upcycle(dense, num_experts=2, rank=24, calibration=[images], blocks=[1]).output_error


def test_padding_meets_no_expert():
    dense, inputs = perturbed("Siglip2VisionModel")
    sparse = ermoe.upcycle(dense, num_experts=4)
    for implementation in ("eager", "sdpa"):
        sparse.set_attn_implementation(implementation)
        with ermoe.record_routing(sparse) as routing, torch.no_grad():
            sparse(**inputs)
        assert [figures["tokens"] for figures in routing.summary().values()] == [28]


def test_networks_can_start_anew():
    dense, _ = perturbed("DINOv3ViTModel")
    before = copy.deepcopy(dense.model.layer[0].mlp.gate_proj.weight)
    restart_ffns(dense)
    assert not torch.equal(dense.model.layer[0].mlp.gate_proj.weight, before)


@pytest.mark.parametrize(
    ("name", "reason"),
    [("CLIPTextModel", "reads text"), ("Siglip2TextModel", "reads text"), ("Dinov2Encoder", "part of a model")],
)
def test_what_sees_no_images_is_refused(name, reason):
    import transformers
    from transformers.models.dinov2.modeling_dinov2 import Dinov2Encoder

    model = Dinov2Encoder if name == "Dinov2Encoder" else getattr(transformers, name)
    known = HUGGING_FACE["Dinov2Model"] if "Dino" in name else HUGGING_FACE["CLIPModel"]["text_config"]
    with pytest.raises(UserError, match=reason):
        ermoe.upcycle(model(model.config_class(**known)))


@pytest.mark.parametrize(
    ("name", "path", "value", "reason"),
    [
        ("CLIPModel", ("config", "attn_implementation"), {"vision_config": "a/kernel"}, "write 'eager' or 'sdpa'"),
        ("CLIPModel", ("class",), "AutoModel", "none of the classes of transformers"),
        ("TimmWrapperModel", ("config", "architecture"), "hf-hub:someone/model", "address of another model"),
        ("TimmWrapperModel", ("config", "model_args"), {"checkpoint_path": "a.pth"}, "may not set checkpoint_path"),
        ("timm", ("visual", "dense", "trunk", "dense", "architecture"), "hf-hub:someone/model", "address of another"),
    ],
)
def test_a_file_cannot_name_foreign_code(name, path, value, reason, tmp_path):
    ermoe.save(tower(name)[0], tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    *parents, last = path
    inner = config["ermoe"]["dense"]
    for key in parents:
        inner = inner[key]
    inner[last] = value
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=reason):
        ermoe.load(tmp_path)


def test_what_a_wrapper_holds_is_treated_as_on_its_own():
    """The blocks of a NaFlexVit are those of a ViT, and padded where theirs are not."""
    import transformers

    flexible = {"embed_dim": 32, "num_heads": 2, "depth": 2, "pos_embed_grid_size": (4, 4)}
    config = transformers.TimmWrapperConfig(architecture="naflexvit_base_patch16_gap", model_args=flexible)
    sparse = ermoe.upcycle(transformers.TimmWrapperModel(config), num_experts=2, route_rank=8)
    assert type(sparse.timm_model.blocks[1]).__name__ == "SparseNaFlexBlock"
