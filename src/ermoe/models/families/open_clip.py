"""open_clip's CLIP and CustomTextCLIP, around its own image tower or one of timm's, and its TimmModel alone."""

from __future__ import annotations

from typing import Any

import torch
from open_clip.model import CLIP, CustomTextCLIP, set_model_preprocess_cfg
from open_clip.timm_model import TimmModel
from open_clip.transformer import TextTransformer
from torch import nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import family_name, family_named
from ermoe.models.families.open_clip_vit import describe_blocks
from ermoe.models.inside import Around

_CLASSES: dict[str, Any] = {"CLIP": CLIP, "CustomTextCLIP": CustomTextCLIP}
_NOT_FROM_FILES = {"hf_model_name", "hf_tokenizer_name", "hf_model_pretrained", "pretrained"}  # fetched from the hub
_SMALL_TOWER = {"layers": 1, "width": 64, "image_size": 32, "patch_size": 32}  # in the place of the one described


class OpenClip(Around):
    """The backbone is open_clip's own tower, or the trunk of one of timm's."""

    def inside(self, model: Any) -> str:
        if isinstance(model, TimmModel):
            return "trunk"
        return "visual.trunk" if isinstance(model.visual, TimmModel) else "visual"

    def describe(self, model: Any) -> Json:
        """The towers one by one, and what joins them."""
        if isinstance(model, TimmModel):
            return _describe_timm(model)
        if type(model).__name__ not in _CLASSES:
            raise UserError(f"{type(model).__name__} cannot be written down: save its image tower, model.visual")
        bias = model.logit_bias
        return {
            "class": type(model).__name__,
            "visual": _describe_part(model.visual),
            "preprocess": getattr(model.visual, "preprocess_cfg", None),
            "text": _describe_text(model),
            "nonscalar_logit_scale": model.logit_scale.dim() == 1,
            "init_logit_bias": None if bias is None else 0.0,
            "output_dict": model.output_dict,
        }

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        if named := sorted(_NOT_FROM_FILES & {*description, *description.get("text", ())}):
            raise UserError(f"a saved model may not set {', '.join(named)}: remove it from config.json")
        if description["class"] == "TimmModel":
            return _build_timm(description, device)
        kept = {name: description[name] for name in ("nonscalar_logit_scale", "init_logit_bias", "output_dict")}
        text = dict(description["text"])
        half = torch.float16 if text.pop("half") else None
        towers = {"embed_dim": text.pop("output_dim"), "vision_cfg": _SMALL_TOWER, "quick_gelu": text.pop("quick_gelu")}
        with torch.device(device):
            model: nn.Module = _CLASSES[description["class"]](**towers, text_cfg=text, cast_dtype=half, **kept)
        model.visual = _build_part(description["visual"], device)
        if description["preprocess"] is not None:
            set_model_preprocess_cfg(model, description["preprocess"])
        return model


def _describe_part(part: nn.Module) -> Json:
    """A module of a family of its own, to be built by that."""
    name = family_name(part)
    return {"family": name, "dense": family_named(name).describe(part)}


def _build_part(described: Json, device: str) -> nn.Module:
    return family_named(described["family"]).build(described["dense"], device=device)


def _describe_timm(model: Any) -> Json:
    head = dict(model.head.named_children())
    if not head.keys() <= {"drop", "proj", "mlp"}:
        raise UserError(f"an image tower that pools by {type(head['pool']).__name__} cannot be written down")
    trunk = _describe_part(model.trunk)
    described = {"class": "TimmModel", "trunk": trunk, "image_size": list(model.image_size)}
    if not head:
        kind = "" if model.trunk.num_classes else "none"
        return {**described, "pool": model.trunk.global_pool, "proj": kind, "embed_dim": model.trunk.num_classes}
    # The trunk was made with a classifier, and rid of it afterwards.
    for name in ("num_classes", "global_pool"):
        trunk["dense"]["args"].pop(name, None)
    last, drop = (head["proj"], head["drop"]) if "proj" in head else (head["mlp"].fc2, head["mlp"].drop1)
    return {
        **described,
        "pool": model.trunk.global_pool,
        "proj": "linear" if "proj" in head else "mlp",
        "embed_dim": last.out_features,
        "proj_bias": last.bias is not None,
        "drop": drop.p,
    }


def _build_timm(description: Json, device: str) -> nn.Module:
    trunk: Any = _build_part(description["trunk"], device)
    if description["proj"] in ("linear", "mlp"):
        trunk.reset_classifier(0, global_pool=description["pool"])
    args = {name: value for name, value in description.items() if name not in ("class", "trunk")}
    args["image_size"] = tuple(args["image_size"])
    with torch.device(device):
        model: nn.Module = TimmModel(description["trunk"]["dense"]["architecture"], **args)
    model.trunk = trunk
    return model


def _describe_text(model: Any) -> Json:
    """The fields of open_clip's configuration of text towers, and what it takes from the model."""
    text = model.text if isinstance(model, CustomTextCLIP) else model
    if isinstance(model, CustomTextCLIP) and not isinstance(text, TextTransformer):
        raise UserError(
            f"its text tower is a {type(text).__name__}, which open_clip builds from the hub: save the image tower, "
            "model.visual, alone"
        )
    described = describe_blocks(text.transformer)
    act, norm = described.pop("act"), described.pop("norm")
    is_quick, is_half = act.pop("class") == "QuickGELU", norm.pop("class") == "LayerNormFp32"
    projection = text.text_projection
    has_bias = isinstance(projection, nn.Linear)
    width = None if projection is None else projection.out_features if has_bias else projection.shape[1]
    names = {"pool_type": "text_pool_type", "eos_id": "text_eos_id"} if text is model else {}
    own = ("context_length", "vocab_size", "pool_type", "eos_id", "pad_id", "output_tokens")
    return {
        **described,
        **{name: getattr(text, names.get(name, name)) for name in own if hasattr(text, names.get(name, name))},
        "embed_cls": getattr(text, "cls_emb", None) is not None,
        "no_causal_mask": text.attn_mask is None,
        "proj_type": "none" if projection is None else "linear",
        "proj_bias": has_bias,
        "act_kwargs": act or None,
        "norm_kwargs": norm or None,
        "quick_gelu": is_quick,
        "half": is_half,
        "output_dim": width or getattr(text, "output_dim", described["width"]),
    }


FAMILY = OpenClip()
