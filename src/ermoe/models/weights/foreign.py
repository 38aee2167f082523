"""Other people's checkpoints for timm's VisionTransformer: torchvision's, Hugging Face's and Google's names for them.

Each dialect is a table of name patterns; the weights themselves differ only in where queries, keys and values are
kept, and in Google's files in the order of axes.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.sparse_block import SparseBlock
from ermoe.models.weights.checkpoints import read_checkpoint
from ermoe.models.weights.state import Fit, load_state

Translation = Iterable[tuple[str, str]]

_TORCHVISION: Translation = (
    (r"class_token", "cls_token"),
    (r"conv_proj\.", "patch_embed.proj."),
    (r"encoder\.pos_embedding", "pos_embed"),
    (r"encoder\.layers\.encoder_layer_(\d+)\.", r"blocks.\1."),
    (r"encoder\.ln\.", "norm."),
    (r"heads\.head\.", "head."),
    (r"\.ln_(\d)\.", r".norm\1."),
    (r"\.self_attention\.in_proj_", ".attn.qkv."),
    (r"\.self_attention\.out_proj\.", ".attn.proj."),
    (r"\.mlp\.(0|linear_1)\.", ".mlp.fc1."),
    (r"\.mlp\.(3|linear_2)\.", ".mlp.fc2."),
)
_HUGGING_FACE: Translation = (
    (r"^vit\.", ""),
    (r"embeddings\.cls_token", "cls_token"),
    (r"embeddings\.position_embeddings", "pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.", "patch_embed.proj."),
    (r"(encoder\.layer|layers)\.(\d+)\.", r"blocks.\2."),
    (r"\.layernorm_before\.", ".norm1."),
    (r"\.layernorm_after\.", ".norm2."),
    (r"\.attention\.(attention\.query|q_proj)\.", ".attn.q."),
    (r"\.attention\.(attention\.key|k_proj)\.", ".attn.k."),
    (r"\.attention\.(attention\.value|v_proj)\.", ".attn.v."),
    (r"\.attention\.(output\.dense|o_proj)\.", ".attn.proj."),
    (r"\.intermediate\.dense\.", ".mlp.fc1."),
    (r"(blocks\.\d+)\.output\.dense\.", r"\1.mlp.fc2."),
    (r"^layernorm\.", "norm."),
    (r"^classifier\.", "head."),
)
_GOOGLE: Translation = (
    (r"^cls$", "cls_token"),
    (r"^embedding/", "patch_embed.proj/"),
    (r"^Transformer/posembed_input/pos_embedding$", "pos_embed"),
    (r"^Transformer/encoderblock_(\d+)/", r"blocks.\1."),
    (r"^Transformer/encoder_norm/", "norm/"),
    (r"LayerNorm_0/", "norm1/"),
    (r"LayerNorm_[12]/", "norm2/"),
    (r"MultiHeadDotProductAttention_[01]/query/", "attn.q/"),
    (r"MultiHeadDotProductAttention_[01]/key/", "attn.k/"),
    (r"MultiHeadDotProductAttention_[01]/value/", "attn.v/"),
    (r"MultiHeadDotProductAttention_[01]/out/", "attn.proj/"),
    (r"MlpBlock_\d/Dense_0/", "mlp.fc1/"),
    (r"MlpBlock_\d/Dense_1/", "mlp.fc2/"),
    (r"/(kernel|scale)$", ".weight"),
    (r"/bias$", ".bias"),
)


def load_weights(model: nn.Module, path: str | os.PathLike[str], *, strict: bool = True) -> Fit:
    """Loads a checkpoint file into a dense backbone, whoever wrote it, and says how it fitted.

    For timm's VisionTransformer the file may be timm's, torchvision's, Hugging Face's or Google's (``.npz``); position
    embeddings and patch filters are resized to the model's. Other backbones take files with their own names. Unless
    ``strict`` is off, names that are missing or in excess are an error that lists them: a head for another number
    of classes, for instance.
    """
    if any(isinstance(module, SparseBlock) for module in model.modules()):
        raise UserError(f"{path}: load weights into the dense model first, then make it sparse with ermoe.upcycle")
    state = read_checkpoint(path)
    resized: tuple[str, ...] = ()
    if isinstance(model, VisionTransformer):
        state, resized = fit_sizes(to_timm(state), model)
    return load_state(model, state, source=path, strict=strict, resized=resized)


def to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a ViT under timm's names, from whichever dialect they are in."""
    if any(name.startswith("Transformer/") for name in state):
        return _join_qkv(_translate(_from_google(state), _GOOGLE))
    if "conv_proj.weight" in state:
        return _translate(state, _TORCHVISION)
    if any(name.endswith("patch_embeddings.projection.weight") for name in state):
        pooled = {name: tensor for name, tensor in state.items() if not name.startswith(("pooler.", "vit.pooler."))}
        return _join_qkv(_translate(pooled, _HUGGING_FACE))
    return state


def _translate(state: dict[str, Tensor], translation: Translation) -> dict[str, Tensor]:
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in translation:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _from_google(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Flax keeps input axes first and heads as an axis; the layer before the head does not exist in timm's model."""
    return {
        name: _axes_like_torch(name, tensor) for name, tensor in state.items() if not name.startswith("pre_logits/")
    }


def _axes_like_torch(name: str, tensor: Tensor) -> Tensor:
    if name == "embedding/kernel":  # height, width, in, out
        return tensor.permute(3, 2, 0, 1).contiguous()
    if name.endswith("/out/kernel"):  # heads, head width, out
        return tensor.flatten(0, 1).t().contiguous()
    if name.endswith(("/query/kernel", "/key/kernel", "/value/kernel")):  # in, heads, head width
        return tensor.flatten(1).t().contiguous()
    if name.endswith(("/query/bias", "/key/bias", "/value/bias")):
        return tensor.flatten()
    return tensor.t().contiguous() if name.endswith("/kernel") else tensor


def _join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: tensor for name, tensor in state.items() if not re.search(r"\.attn\.[qkv]\.", name)}
    for name in state:
        if ".attn.q." in name:
            names = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
            if not all(part in state for part in names):
                raise UserError(f"the checkpoint has {name} without its keys or values: it is incomplete")
            joined[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([state[part] for part in names])
    return joined


def fit_sizes(state: dict[str, Tensor], model: VisionTransformer) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Resizes position embeddings and patch filters to those of ``model``; the names of what was resized."""
    resizers: dict[str, Callable[[Tensor], Tensor]] = {
        "pos_embed": lambda tensor: _resize_positions(tensor, model),
        "patch_embed.proj.weight": lambda tensor: resample_patch_embed(tensor, list(model.patch_embed.patch_size)),
    }
    state, resized = dict(state), []
    own = model.state_dict()
    for name, resize in resizers.items():
        if name in state and name in own and state[name].shape != own[name].shape:
            fitting = resize(state[name])
            if fitting.shape == own[name].shape:
                state[name] = fitting
                resized.append(name)
    return state, tuple(resized)


def _resize_positions(positions: Tensor, model: VisionTransformer) -> Tensor:
    num_prefix_tokens = 0 if model.no_embed_class else model.num_prefix_tokens
    return resample_abs_pos_embed(
        positions, new_size=list(model.patch_embed.grid_size), num_prefix_tokens=num_prefix_tokens
    )
