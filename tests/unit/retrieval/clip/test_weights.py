"""OpenAI's, LAION's and Hugging Face's files, small ones of the same format: everything fits, or nothing is loaded."""

import json
import zipfile

import open_clip
import pytest
import torch
from safetensors.torch import save_file
from transformers import CLIPConfig, CLIPModel

from ermoe.errors import UserError
from ermoe.models.upcycle import upcycle
from ermoe.retrieval.clip.model import create_clip
from ermoe.retrieval.clip.towers import tokenise
from ermoe.retrieval.clip.weights import load_clip_weights, to_open_clip
from ermoe.retrieval.presets import TextShape

WIDTH, LAYERS, PATCH, SIDE, DIM = 64, 3, 8, 32, 24
TOWER = {"img_size": SIDE, "patch_size": PATCH, "embed_dim": WIDTH, "depth": LAYERS, "num_heads": 1}


def foreign(quick_gelu=True, custom_text=False):
    vision = {"image_size": SIDE, "layers": LAYERS, "width": WIDTH, "head_width": WIDTH, "patch_size": PATCH}
    text = {"context_length": 12, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2}
    kind = open_clip.CustomTextCLIP if custom_text else open_clip.CLIP
    torch.manual_seed(5)
    return kind(DIM, vision, text, quick_gelu=quick_gelu).eval()


def ours(quick_gelu=True, **changes):
    name = "vit_base_patch16_clip_quickgelu_224" if quick_gelu else "vit_base_patch16_clip_224"
    text = TextShape(context_length=12, width=32, heads=2, layers=2, quick_gelu=quick_gelu)
    return create_clip(name, text, embed_dim=DIM, seed=9, image_args={**TOWER, **changes}).eval()


def assert_same_features(model, reference_image, reference_text):
    image, text = inputs()
    with torch.inference_mode():
        torch.testing.assert_close(model.encode_image(image), reference_image, atol=2e-5, rtol=0)
        torch.testing.assert_close(model.encode_text(text), reference_text, atol=2e-5, rtol=0)


def inputs():
    image = torch.randn(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))
    return image, tokenise(["a dog", "a cat on a mat"], 12).id_TL.long()


@pytest.mark.parametrize("quick_gelu", [True, False], ids=["openai", "laion"])
@pytest.mark.parametrize("custom_text", [False, True], ids=["text-at-top", "text-tower"])
@pytest.mark.parametrize("suffix", ["safetensors", "pt"])
def test_open_clip_files_give_the_same_features(tmp_path, quick_gelu, custom_text, suffix):
    reference = foreign(quick_gelu, custom_text)
    state = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
    state |= {"input_resolution": torch.tensor(SIDE), "context_length": torch.tensor(12)}  # as OpenAI's have
    path = tmp_path / f"clip.{suffix}"
    save_file(state, path) if suffix == "safetensors" else torch.save({"state_dict": state}, path)
    model = ours(quick_gelu)
    fit = load_clip_weights(model, path)
    assert fit.missing == fit.unexpected == fit.resized == ()
    image, text = inputs()
    assert_same_features(model, reference.encode_image(image), reference.encode_text(text))
    assert model.logit_scale.item() == reference.logit_scale.item()
    sparse = upcycle(model, num_experts=4).eval()
    torch.testing.assert_close(sparse.encode_image(image), model.encode_image(image), atol=1e-4, rtol=0)


def test_hugging_face_files_give_the_same_features(tmp_path):
    shape = {"intermediate_size": 4 * WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 1}
    vision = {"hidden_size": WIDTH, "image_size": SIDE, "patch_size": PATCH, **shape}
    text = {"hidden_size": 32, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"max_position_embeddings": 12, "vocab_size": 49408, "eos_token_id": 49407, "bos_token_id": 49406}
    torch.manual_seed(3)
    config = CLIPConfig(text_config=text, vision_config=vision, projection_dim=DIM)
    reference = CLIPModel(config).eval()
    reference.save_pretrained(tmp_path)
    model = ours()
    load_clip_weights(model, tmp_path / "model.safetensors")
    image, tokens = inputs()
    with torch.inference_mode():
        outputs = reference(pixel_values=image, input_ids=tokens)
        ours_image, ours_text, _ = model(image, tokens)
    torch.testing.assert_close(ours_image, outputs.image_embeds, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours_text, outputs.text_embeds, atol=2e-5, rtol=0)


def test_a_file_of_ours_loads_back_and_one_part_leaves_the_other_alone(tmp_path):
    reference, model = ours(), ours()
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.add_(0.1)
    save_file(reference.state_dict(), tmp_path / "ours.safetensors")
    before = model.visual.head.proj.weight.clone()
    load_clip_weights(model, tmp_path / "ours.safetensors", parts=("text",))
    assert torch.equal(model.visual.head.proj.weight, before)
    assert torch.equal(model.text.text_projection, reference.text.text_projection)
    assert torch.equal(model.logit_scale, reference.logit_scale)


def test_another_image_size_is_resized_and_reported(tmp_path):
    save_file(foreign().state_dict(), tmp_path / "clip.safetensors")
    assert load_clip_weights(ours(img_size=48), tmp_path / "clip.safetensors").resized == ("pos_embed",)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (lambda state: state.pop("visual.proj"), r"missing visual\.head\.proj\.weight"),
        (lambda state: state.pop("transformer.resblocks.1.mlp.c_fc.bias"), r"missing text\.transformer"),
        (lambda state: state.update({"visual.extra": torch.zeros(1)}), r"unexpected visual\.extra"),
        (
            lambda state: state.update({"positional_embedding": torch.zeros(77, 32)}),
            r"\(77, 32\) instead of \(12, 32\)",
        ),
        (lambda state: state.update({"visual.proj": torch.zeros(4)}), r"visual\.proj has shape \(4,\), not that of a"),
        (lambda state: state.update({"logit_scale": torch.zeros(2)}), r"logit_scale has shape \(2,\), not one number"),
    ],
)
def test_what_does_not_fit_is_listed_and_nothing_is_loaded(tmp_path, change, complaint):
    state = foreign().state_dict()
    change(state)
    save_file(state, tmp_path / "clip.safetensors")
    model = ours()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(UserError, match=complaint):
        load_clip_weights(model, tmp_path / "clip.safetensors")
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_queries_keys_and_values_of_different_shapes_are_refused():
    prefix = "text_model.encoder.layers.0.self_attn"
    state = {
        f"{prefix}.{part}_proj.weight": torch.zeros(4, width) for part, width in zip("qkv", (4, 4, 3), strict=True)
    }
    with pytest.raises(UserError, match="cannot be joined"):
        to_open_clip(state)


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("open_clip_config.json", {"model_cfg": {"embed_dim": DIM, "quick_gelu": True}}),
        ("config.json", {"text_config": {"hidden_act": "quick_gelu"}}),
    ],
)
def test_the_wrong_activation_is_noticed_where_a_configuration_tells_it(tmp_path, name, config):
    save_file(foreign().state_dict(), tmp_path / "clip.safetensors")
    (tmp_path / name).write_text(json.dumps(config))
    load_clip_weights(ours(), tmp_path / "clip.safetensors")
    with pytest.raises(UserError, match="was trained with QuickGELU"):
        load_clip_weights(ours(quick_gelu=False), tmp_path / "clip.safetensors")


def test_a_torchscript_program_is_not_run(tmp_path):
    with zipfile.ZipFile(tmp_path / "ViT-B-16.pt", "w") as archive:
        for name in ("data.pkl", "constants.pkl", "code/__torch__/model.py"):
            archive.writestr(f"ViT-B-16/{name}", b"")
    with pytest.raises(UserError, match="is a TorchScript program"):
        load_clip_weights(ours(), tmp_path / "ViT-B-16.pt")


def test_weights_go_into_the_dense_model(tmp_path):
    with pytest.raises(UserError, match="dense model first"):
        load_clip_weights(upcycle(ours(), num_experts=4), tmp_path / "clip.safetensors")
    with pytest.raises(UserError, match="no part 'audio'"):
        load_clip_weights(ours(), tmp_path / "clip.safetensors", parts=("audio",))
