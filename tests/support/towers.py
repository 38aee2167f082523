"""Tiny models of Hugging Face and open_clip, every class with a head of its own, and what each of them takes."""

import torch

SIZE, PATCH = 32, 8
WIDTH = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
IMAGES = {**WIDTH, "intermediate_size": 64, "image_size": SIZE, "patch_size": PATCH}
VIT = {**IMAGES, "hidden_dropout_prob": 0.1, "encoder_stride": PATCH, "num_labels": 5}
BEIT = {**IMAGES, "hidden_dropout_prob": 0.1, "drop_path_rate": 0.2, "num_labels": 5, "vocab_size": 30}
DINO = {**WIDTH, "mlp_ratio": 2, "image_size": SIZE, "patch_size": PATCH, "drop_path_rate": 0.2, "num_labels": 5}
DINO3 = {**IMAGES, "drop_path_rate": 0.2, "num_register_tokens": 3, "pos_embed_rescale": 2.0}
DECODER = {f"decoder_{name}": value for name, value in {**WIDTH, "intermediate_size": 32}.items()}
TEXT = {**WIDTH, "intermediate_size": 32, "vocab_size": 50, "max_position_embeddings": 8, "bos_token_id": 1}
TEXT = {**TEXT, "eos_token_id": 2, "projection_size": 32}
PAIR = {"text_config": TEXT, "vision_config": IMAGES, "num_labels": 5}
FLAT = {**WIDTH, "intermediate_size": 64, "num_patches": 16, "patch_size": PATCH}
STAGES = {"out_features": ["stage1", "stage2"]}

# Class of transformers -> its configuration
HUGGING_FACE = {
    "DeiTForImageClassificationWithTeacher": VIT,
    "DeiTForImageClassification": VIT,
    "DeiTForMaskedImageModeling": VIT,
    "DeiTModel": VIT,
    "ViTModel": VIT,
    "ViTMAEForPreTraining": {**IMAGES, **DECODER},
    "ViTMAEModel": IMAGES,
    "BeitForImageClassification": {**BEIT, "use_relative_position_bias": True},
    "BeitForMaskedImageModeling": {**BEIT, "use_mask_token": True, "layer_scale_init_value": 0.0},
    "BeitBackbone": {**BEIT, **STAGES, "use_absolute_position_embeddings": True},
    "BeitModel": {**BEIT, "use_shared_relative_position_bias": True},
    "Dinov2ForImageClassification": DINO,
    "Dinov2Model": {**DINO, "use_swiglu_ffn": True},
    "Dinov2Backbone": {**DINO, **STAGES},
    "Dinov2WithRegistersForImageClassification": DINO,
    "Dinov2WithRegistersModel": {**DINO, "use_swiglu_ffn": True},
    "Dinov2WithRegistersBackbone": {**DINO, **STAGES},
    "DINOv3ViTModel": {**DINO3, "use_gated_mlp": True, "hidden_act": "silu", "mlp_bias": False},
    "DINOv3ViTBackbone": {**DINO3, **STAGES},
    "CLIPVisionModel": IMAGES,
    "CLIPVisionModelWithProjection": {**IMAGES, "projection_dim": 24},
    "CLIPModel": {**PAIR, "projection_dim": 24},
    "CLIPForImageClassification": PAIR,
    "SiglipVisionModel": IMAGES,
    "SiglipModel": PAIR,
    "SiglipForImageClassification": PAIR,
    "Siglip2VisionModel": FLAT,
    "Siglip2Model": {**PAIR, "vision_config": FLAT},
    "Siglip2ForImageClassification": {**PAIR, "vision_config": FLAT},
    "TimmWrapperModel": {"architecture": "test_vit", "model_args": {"img_size": SIZE, "depth": 2}},
    "TimmWrapperForImageClassification": {"architecture": "eva02_tiny_patch14_224", "num_labels": 5}
    | {"model_args": {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 2, "depth": 2}},
}

TOWER = {"layers": 2, "width": 32, "head_width": 16, "image_size": SIZE, "patch_size": PATCH}
TIMM = {"timm_model_name": "test_vit"}
SCALED = {"qk_norm": True, "scale_heads": True, "scale_attn_inner": True, "scale_attn": True}
SIGLIP_TEXT = {"no_causal_mask": True, "proj_bias": True, "pool_type": "last", "act_kwargs": {"approximate": "tanh"}}

# Name -> class of open_clip, its image tower, its text tower, other arguments
OPEN_CLIP = {
    "plain": ("CLIP", {**TOWER, "ls_init_value": 0.1, "patch_dropout": 0.2}, {}, {"quick_gelu": True}),
    "custom blocks": ("CLIP", {**TOWER, **SCALED, "pool_type": "avg"}, {}, {"init_logit_bias": -10.0}),
    "attention pool": ("CustomTextCLIP", {**TOWER, "attentional_pool": True, "attn_pooler_heads": 2}, SIGLIP_TEXT, {}),
    "timm": ("CustomTextCLIP", {**TIMM, "timm_pool": "avg", "timm_proj": "linear"}, {}, {"output_dict": True}),
    "timm, its own head": ("CLIP", {**TIMM, "timm_pool": "token", "timm_proj": None}, {}, {}),
}
NAMES = [*HUGGING_FACE, *OPEN_CLIP]


def tower(name):
    """A model by name, and keyword arguments that it takes."""
    if name in OPEN_CLIP:
        return _open_clip(name), {"image": _images(), "text": _text()}
    import transformers

    model = getattr(transformers, name)
    return model(model.config_class(**HUGGING_FACE[name])), _inputs(name)


def _open_clip(name):
    import open_clip

    kind, image, text, others = OPEN_CLIP[name]
    text = {"context_length": 8, "vocab_size": 50, "width": 32, "heads": 2, "layers": 1, **text}
    model = getattr(open_clip, kind)(24, image, text, **others)
    if "timm_model_name" in image:  # timm's own size until it is told another
        model.visual.set_input_size(SIZE)
    return model


def _inputs(name):
    inputs = {"pixel_values": _images()}
    if name.startswith("Siglip2"):  # the second image is smaller, and padded
        inputs = {"pixel_values": _random(2, 16, 3 * PATCH**2), "pixel_attention_mask": torch.ones(2, 16).long()}
        inputs["pixel_attention_mask"][1, 12:] = 0
        inputs["spatial_shapes"] = torch.tensor([[4, 4], [3, 4]])
    if name.startswith("ViTMAE"):
        inputs["noise"] = _random(2, 16)
    if name in ("CLIPModel", "SiglipModel", "Siglip2Model"):
        inputs["input_ids"] = _text()
    return inputs


def _images():
    return _random(2, 3, SIZE, SIZE)


def _text():
    return torch.randint(3, 40, (2, 8), generator=torch.Generator().manual_seed(0))


def _random(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def tensors(output, prefix=""):
    """All tensors of numbers that a model says, by name."""
    if isinstance(output, torch.Tensor):
        return {prefix: output} if output.is_floating_point() else {}
    named = output.items() if hasattr(output, "items") else enumerate(output or ())
    return {name: t for key, value in named for name, t in tensors(value, f"{prefix}.{key}").items()}
