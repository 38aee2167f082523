"""CLIP weights from local files: open_clip's and OpenAI's names, with native or timm image towers, and Hugging Face's.

Everything a part of the model needs must be in the file, or nothing is loaded.
"""

from __future__ import annotations

import re
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ermoe.errors import UserError
from ermoe.files import StrPath, read_json
from ermoe.models.backbones import SparseBlock
from ermoe.models.io import Fit, load_state
from ermoe.models.weights.foreign import Translation, fit_sizes, translate
from ermoe.models.weights.stored import check_archive, read_checkpoint
from ermoe.retrieval.clip.model import CLIP, UNKNOWN_PRETRAINING

PARTS = ("image", "text")
_PREFIXES = {"image": ("visual.",), "text": ("text.", "logit_scale")}
# Numbers that OpenAI's archives keep beside the weights, masks, and counters of Hugging Face's.
_NOT_WEIGHTS = re.compile(
    r"^(input_resolution|context_length|vocab_size|logit_bias)$|(^|\.)(attn_mask|position_ids)$|^trained_on$"
)
_OPEN_CLIP_TEXT: Translation = (
    (r"^(transformer|token_embedding|positional_embedding|ln_final|text_projection)(?=\.|$)", r"text.\1"),
)
_OPEN_CLIP_IMAGE: Translation = (
    (r"^visual\.conv1\.", "visual.trunk.patch_embed.proj."),
    (r"^visual\.class_embedding$", "visual.trunk.cls_token"),
    (r"^visual\.positional_embedding$", "visual.trunk.pos_embed"),
    (r"^visual\.ln_pre\.", "visual.trunk.norm_pre."),
    (r"^visual\.ln_post\.", "visual.trunk.norm."),
    (r"^visual\.proj$", "visual.head.proj.weight"),
    (r"^visual\.transformer\.resblocks\.(\d+)\.ln_(\d)\.", r"visual.trunk.blocks.\1.norm\2."),
    (r"^visual\.transformer\.resblocks\.(\d+)\.attn\.in_proj_", r"visual.trunk.blocks.\1.attn.qkv."),
    (r"^visual\.transformer\.resblocks\.(\d+)\.attn\.out_proj\.", r"visual.trunk.blocks.\1.attn.proj."),
    (r"^visual\.transformer\.resblocks\.(\d+)\.mlp\.c_fc\.", r"visual.trunk.blocks.\1.mlp.fc1."),
    (r"^visual\.transformer\.resblocks\.(\d+)\.mlp\.c_proj\.", r"visual.trunk.blocks.\1.mlp.fc2."),
)
_HUGGING_FACE: Translation = (
    (r"^text_model\.embeddings\.token_embedding\.", "token_embedding."),
    (r"^text_model\.embeddings\.position_embedding\.weight$", "positional_embedding"),
    (r"^text_model\.final_layer_norm\.", "ln_final."),
    (r"^text_projection\.weight$", "text_projection"),
    (r"^vision_model\.embeddings\.class_embedding$", "visual.class_embedding"),
    (r"^vision_model\.embeddings\.patch_embedding\.", "visual.conv1."),
    (r"^vision_model\.embeddings\.position_embedding\.weight$", "visual.positional_embedding"),
    (r"^vision_model\.pre_layrnorm\.", "visual.ln_pre."),
    (r"^vision_model\.post_layernorm\.", "visual.ln_post."),
    (r"^visual_projection\.weight$", "visual.proj"),
    (r"^text_model\.encoder\.layers\.", "transformer.resblocks."),
    (r"^vision_model\.encoder\.layers\.", "visual.transformer.resblocks."),
    (r"\.layer_norm(\d)\.", r".ln_\1."),
    (r"\.mlp\.fc1\.", ".mlp.c_fc."),
    (r"\.mlp\.fc2\.", ".mlp.c_proj."),
    (r"\.self_attn\.out_proj\.", ".attn.out_proj."),
)


def load_clip_weights(model: CLIP, path: StrPath, *, parts: tuple[str, ...] = PARTS) -> Fit:
    """Loads both towers, or the ``parts`` named: with the text tower comes the scale.

    The file is open_clip's (LAION, DataComp, OpenAI in its form), OpenAI's state dict, or Hugging Face's CLIPModel. A
    tensor that is missing, in excess or of another shape is an error that lists it; only the position embeddings of
    another image size are resized, and reported.
    """
    if unknown := sorted(set(parts) - set(PARTS)):
        raise UserError(f"a CLIP has no part {unknown[0]!r}: use {' and '.join(PARTS)}")
    if any(isinstance(module, SparseBlock) for module in model.modules()):
        raise UserError(f"{path}: load weights into the dense model first, then make it sparse with ermoe.upcycle")
    check_archive(path)
    _refuse_programs(Path(path))
    _check_activation(model, Path(path))
    stored = read_checkpoint(path)
    state = to_open_clip(stored)
    state, resized = _fit_positions(state, model)
    chosen = tuple(prefix for part in parts for prefix in _PREFIXES[part])
    wanted = {name: tensor for name, tensor in state.items() if name.startswith(chosen)}
    kept = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith(chosen)}
    fit = load_state(model, {**kept, **wanted}, path=path, resized=resized)
    _take_training_ids(model, stored.get("trained_on"))
    return fit


def _take_training_ids(model: CLIP, trained_on: Tensor | None) -> None:
    """Weights of ours bring the ids of their training images along; of others nobody knows them."""
    if trained_on is None or not len(trained_on):
        model.remember([UNKNOWN_PRETRAINING])
    else:
        model.trained_on = torch.unique(torch.cat([model.trained_on, trained_on.to(model.trained_on)]))


def to_open_clip(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Weights under the names of this package's `CLIP`, from whichever dialect they are in."""
    state = {name: tensor for name, tensor in state.items() if not _NOT_WEIGHTS.search(name)}
    if any(name.startswith("text_model.") for name in state):
        state = _from_hugging_face(state)
    if "visual.proj" in state:
        # A matrix from the left in open_clip's towers, a linear layer in timm's.
        state["visual.proj"] = _turned(state, "visual.proj")
    state = translate(state, (*_OPEN_CLIP_TEXT, *_OPEN_CLIP_IMAGE))
    if (scale := state.get("logit_scale")) is not None:
        if scale.numel() != 1:
            raise UserError(f"logit_scale has shape {tuple(scale.shape)}, not one number: this is no CLIP checkpoint")
        state["logit_scale"] = scale.reshape(1)
    for name, axes in (("visual.trunk.cls_token", 1), ("visual.trunk.pos_embed", 2)):
        if name in state and state[name].dim() == axes:
            state[name] = state[name].reshape(1, -1, state[name].shape[-1])
    return state


def _from_hugging_face(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Queries, keys and values are joined; projections are turned to matrices from the left."""
    joined: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if match := re.match(r"(.*)\.self_attn\.([qkv])_proj\.(weight|bias)$", name):
            if match[2] != "q":
                continue
            names = [f"{match[1]}.self_attn.{part}_proj.{match[3]}" for part in "qkv"]
            if lacking := [part for part in names if part not in state]:
                raise UserError(f"the checkpoint has {name} without {lacking[0]}: it is incomplete")
            joined[f"{match[1]}.attn.in_proj_{match[3]}"] = _stacked(state, names)
        elif name in ("text_projection.weight", "visual_projection.weight"):
            joined[name] = _turned(state, name)
        else:
            joined[name] = tensor
    return translate(joined, _HUGGING_FACE)


def _turned(state: dict[str, Tensor], name: str) -> Tensor:
    if state[name].dim() != 2:
        raise UserError(f"{name} has shape {tuple(state[name].shape)}, not that of a matrix: the file is damaged")
    return state[name].mT.contiguous()


def _stacked(state: dict[str, Tensor], names: list[str]) -> Tensor:
    shapes = {tuple(state[name].shape) for name in names}
    if len(shapes) > 1 or () in shapes:
        raise UserError(f"{names[0]} and its companions have shapes {sorted(shapes)}: they cannot be joined")
    return torch.cat([state[name] for name in names])


def _fit_positions(state: dict[str, Tensor], model: CLIP) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    prefix = "visual.trunk."
    trunk = {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
    fitting, resized = fit_sizes(trunk, model.visual.trunk)
    return state | {prefix + name: tensor for name, tensor in fitting.items()}, resized


def _refuse_programs(path: Path) -> None:
    """OpenAI publishes TorchScript archives: weights inside a program that would have to be run to be read."""
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            if any(name.endswith("/constants.pkl") for name in archive.namelist()):
                raise UserError(
                    f"{path} is a TorchScript program, which ermoe does not run: take the same weights as safetensors, "
                    "or save the model's state_dict"
                )


def _check_activation(model: CLIP, path: Path) -> None:
    """The activation is not in the weights. Where a configuration lies beside them, the two must agree."""
    declared = _declared_quick_gelu(path.parent)
    if declared is not None and declared != model.text.shape.quick_gelu:
        raise UserError(
            f"{path} was trained with {'QuickGELU' if declared else 'GELU'}, as the configuration beside it says: "
            f"build the model with TextShape(quick_gelu={declared}) and the image tower that goes with it"
        )


def _declared_quick_gelu(folder: Path) -> bool | None:
    for name in ("open_clip_config.json", "config.json"):
        try:
            config: Any = read_json(folder / name, "mend or remove it")
        except UserError:  # it is no part of the weights
            continue
        if isinstance(config, dict) and isinstance(config.get("model_cfg"), dict):
            return bool(config["model_cfg"].get("quick_gelu", False))
        if isinstance(config, dict) and isinstance(config.get("text_config"), dict):
            return bool(config["text_config"].get("hidden_act", "quick_gelu") == "quick_gelu")
    return None
