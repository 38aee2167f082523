"""Models of Hugging Face and open_clip, whatever head is on them: made sparse, trained, saved, counted."""

import copy
import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

import ermoe
from ermoe.errors import UserError
from ermoe.models.backbones import family_of
from ermoe.models.upcycle import restart_ffns
from support.backbones import apart, build, distance, perturb
from support.towers import HUGGING_FACE, IMAGES, NAMES, SIZE, TOWER, VIT, WIDTH, tensors, tower


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


def from_transformers(model, folder):
    """A model as ``save_pretrained`` left it: by an Auto class that knows it, or else its own, and by ermoe."""
    from transformers.models.auto import modeling_auto

    model.save_pretrained(folder)
    kinds = [kind for kind in vars(modeling_auto).values() if isinstance(kind, type)]
    autos = [kind for kind in kinds if getattr(kind, "_model_mapping", None) is not None]
    known = [auto for auto in autos if auto._model_mapping.get(type(model.config), None) is type(model)]
    known = [auto for auto in known if auto is not modeling_auto.AutoBackbone]  # which takes no folders
    return (known or [type(model)])[0].from_pretrained(folder), ermoe.load(folder)


def is_on_meta(module):
    return any(isinstance(value, torch.Tensor) and value.is_meta for value in vars(module).values()) or any(
        tensor.is_meta for tensor in (*module.parameters(), *module.buffers())
    )


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
        for loaded in from_transformers(sparse, tmp_path / "pretrained") if name in HUGGING_FACE else ():
            assert type(loaded) is type(sparse)
            assert not any(is_on_meta(module) for module in loaded.modules())
            for key, tensor in says(loaded.eval(), inputs).items():
                torch.testing.assert_close(tensor, after[key], msg=key)
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
    work = ermoe.count(sparse).multiply_adds
    assert min(work.embedding, work.attention, work.context, work.experts) > 0
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


@pytest.fixture(scope="module")
def sparse():
    return apart(ermoe.upcycle(build("hugging face")[0], num_experts=4, blocks=[1, 3]))


@pytest.fixture(scope="module")
def folder(sparse, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pretrained") / "model"
    sparse.save_pretrained(folder)
    return folder


class TestTransformersOwnFiles:
    def test_others_may_read_the_weights_as_they_may_the_configuration(self, folder):
        modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
        assert len(modes) == 1

    def test_a_dense_class_is_told_instead_of_drawing_networks_anew(self, folder, tmp_path):
        from transformers import CLIPVisionModel, ViTForImageClassification

        with pytest.raises(ValueError, match="this model is sparse: import ermoe"):
            ViTForImageClassification.from_pretrained(folder)
        ermoe.upcycle(tower("CLIPModel")[0], num_experts=2).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="this model is sparse: import ermoe"):
            CLIPVisionModel.from_pretrained(tmp_path)

    def test_heads_and_precisions_can_be_others(self, sparse, folder):
        from transformers import AutoModel, AutoModelForImageClassification

        half = AutoModelForImageClassification.from_pretrained(folder, dtype=torch.bfloat16)
        assert {parameter.dtype for parameter in half.parameters()} == {torch.bfloat16}
        assert {buffer.dtype for buffer in half.buffers()} == {torch.float32}  # offsets
        options = {"num_labels": 3, "ignore_mismatched_sizes": True}
        three = AutoModelForImageClassification.from_pretrained(folder, **options)
        headless = AutoModel.from_pretrained(folder)
        basis = sparse.vit.layers[3].mlp.experts.up.U
        assert three.classifier.out_features == 3
        assert torch.equal(three.vit.layers[3].mlp.experts.up.U, basis)
        assert torch.equal(headless.layers[3].mlp.experts.up.U, basis)

    def test_a_sparse_model_can_start_from_its_configuration(self, sparse):
        from transformers import AutoModelForImageClassification

        fresh = AutoModelForImageClassification.from_config(ermoe.merge(sparse).config)
        assert type(fresh) is type(sparse)
        assert fresh.sparsity.merged
        assert all(parameter.isfinite().all() for parameter in fresh.parameters())
        assert type(pickle.loads(pickle.dumps(fresh))) is type(sparse)

    def test_other_models_of_a_configuration_stay_dense(self, tmp_path):
        from transformers import ViTForImageClassification

        dense, _ = build("hugging face")
        config = dense.config
        sparse = ermoe.upcycle(dense, num_experts=2, inplace=True)
        assert sparse.vit.config is sparse.config
        ViTForImageClassification(config).save_pretrained(tmp_path)
        assert type(ViTForImageClassification.from_pretrained(tmp_path)) is ViTForImageClassification
        again = ermoe.to_dense(sparse)
        assert type(again) is ViTForImageClassification
        assert type(again.vit.config) is type(config)
        assert not hasattr(again.config, "ermoe")

    def test_weights_of_experts_are_never_drawn_anew(self, folder, tmp_path):
        from transformers import AutoModelForImageClassification, ViTConfig

        from ermoe.models.hugging_face import SparseViTForImageClassification

        shutil.copytree(folder, tmp_path / "copy")
        weights = load_file(folder / "model.safetensors")
        del weights["vit.layers.3.mlp.experts.up.U"]
        save_file(weights, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
        with pytest.raises(UserError, match=r"lacks weights of experts, for example vit\.layers\.3\.mlp"):
            AutoModelForImageClassification.from_pretrained(tmp_path / "copy")
        with pytest.raises(UserError, match="does not say how a SparseViTForImageClassification is sparse"):
            SparseViTForImageClassification(ViTConfig(**VIT))


def test_a_model_around_a_tower_keeps_it_sparse(tmp_path):
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**WIDTH, num_key_value_heads=2, intermediate_size=32, vocab_size=50, pad_token_id=0)
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(**IMAGES), text_config=text, image_token_index=49, vision_feature_layer=-1
    )
    dense = perturb(LlavaForConditionalGeneration(config)).eval()
    inputs = tower("CLIPVisionModel")[1]
    inputs["input_ids"] = torch.tensor([[3] + [49] * 16 + [4, 5]]).repeat(2, 1)
    with torch.no_grad():
        expected = dense(**inputs).logits
        sparse = ermoe.upcycle(dense, num_experts=4, inplace=True)
        assert distance(sparse(**inputs).logits, expected) <= 1e-4
        assert type(config.vision_config) is CLIPVisionConfig  # other models may be made from it
        apart(sparse).save_pretrained(tmp_path)
        again = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
        torch.testing.assert_close(again(**inputs).logits, sparse(**inputs).logits)
        assert distance(again(**inputs).logits, expected) > 1e-3
    assert again.config.vision_config is again.model.vision_tower.config
    plain = ermoe.to_dense(ermoe.upcycle(LlavaForConditionalGeneration(config)))
    assert type(plain.config.vision_config) is type(plain.model.vision_tower.config) is CLIPVisionConfig


def test_coca_has_one_tower_that_sees(caplog):
    from open_clip.coca_model import CoCa

    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1}
    image = {**TOWER, "attentional_pool": True, "attn_pooler_heads": 2, "output_tokens": True}
    dense = perturb(CoCa(32, text, text, image)).eval()
    sparse = ermoe.upcycle(dense, num_experts=4)
    assert "ermoe.save(model.visual, folder)" in caplog.text
    images = tower("plain")[1]["image"]
    assert distance(sparse.encode_image(images), dense.encode_image(images)) <= 1e-4
    with pytest.raises(UserError, match=r"TextTransformer sees no images: pass the image tower, model\.visual"):
        ermoe.upcycle(dense.text)


def test_what_a_wrapper_holds_is_treated_as_on_its_own():
    """The blocks of a NaFlexVit are those of a ViT, and padded where theirs are not."""
    import transformers

    flexible = {"embed_dim": 32, "num_heads": 2, "depth": 2, "pos_embed_grid_size": (4, 4)}
    config = transformers.TimmWrapperConfig(architecture="naflexvit_base_patch16_gap", model_args=flexible)
    sparse = ermoe.upcycle(transformers.TimmWrapperModel(config), num_experts=2, route_rank=8)
    assert type(sparse.timm_model.blocks[1]).__name__ == "SparseNaFlexBlock"


@pytest.mark.parametrize(
    "name", ["ViTModel", "CLIPVisionModel", "SiglipVisionModel", "Siglip2VisionModel", "DeiTModel"]
)
def test_hidden_states_are_shown_as_before(name, monkeypatch):
    from transformers.utils import output_capturing

    dense, inputs = perturbed(name)
    sparse_name = str(type(ermoe.upcycle(dense)))
    monkeypatch.delitem(output_capturing._CAN_RECORD_REGISTRY, sparse_name)  # as in a process that loaded none yet
    sparse = ermoe.upcycle(dense, num_experts=4)
    before, after = (model(**inputs, output_hidden_states=True).hidden_states for model in (dense, sparse))
    assert len(before) == len(after) == 3
    assert distance(after[1], before[1]) <= 1e-4


def test_attention_that_somebody_else_computes_is_refused():
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    dense, _ = perturbed("DeiTModel")
    ALL_ATTENTION_FUNCTIONS.register("mine", ALL_ATTENTION_FUNCTIONS["sdpa"])
    dense.set_attn_implementation("mine")
    with pytest.raises(UserError, match=r"its attention is computed by 'mine'.*set_attn_implementation\('sdpa'\)"):
        ermoe.upcycle(dense)
    assert ermoe.upcycle(dense, score="prototype").sparsity.blocks == (1,)


@pytest.mark.parametrize("name", ["DeiTModel", "plain"])
def test_what_cannot_be_saved_is_said_before_training(name, caplog):
    dense, _ = perturbed(name)
    dense.__class__ = type("Mine", (type(dense),), {})
    ermoe.upcycle(dense)
    assert "ermoe.save will not write this Mine: " in caplog.text


@pytest.mark.parametrize(
    ("name", "options"),
    [("ViTModel", {"add_pooling_layer": False}), ("DeiTModel", {"add_pooling_layer": False, "use_mask_token": True})],
)
def test_what_the_constructor_was_told_is_kept(name, options, tmp_path):
    import transformers

    kind = getattr(transformers, name)
    model = ermoe.upcycle(kind(kind.config_class(**HUGGING_FACE[name]), **options), num_experts=2).eval()
    ermoe.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "theirs")
    images = torch.randn(2, 3, SIZE, SIZE)
    with torch.no_grad():
        expected = model(images).last_hidden_state
        for again in (ermoe.load(tmp_path / "saved"), transformers.AutoModel.from_pretrained(tmp_path / "theirs")):
            assert again.pooler is None
            assert set(again.state_dict()) == set(model.state_dict())
            assert torch.equal(again.eval()(images).last_hidden_state, expected)
