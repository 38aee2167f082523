"""Other people's checkpoints for timm's VisionTransformer: torchvision's, Hugging Face's and Google's names for them.

Each dialect is a table of name patterns; the weights themselves differ only in where queries, keys and values are
kept, and in Google's files in the order of axes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable

import torch
from timm.layers import resample_abs_pos_embed, resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.models.backbones import SparseBlock
from ermoe.models.io import Fit, load_state
from ermoe.models.weights.stored import read_checkpoint

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

# Names of Flax's weights -> their number of axes, and how they become torch's.
_FLAX_AXES: tuple[tuple[str, int, Callable[[Tensor], Tensor]], ...] = (
    (r"^embedding/kernel$", 4, lambda t: t.permute(3, 2, 0, 1)),  # height, width, in, out
    (r"/out/kernel$", 3, lambda t: t.flatten(0, 1).t()),  # heads, head width, out
    (r"/(query|key|value)/kernel$", 3, lambda t: t.flatten(1).t()),  # in, heads, head width
    (r"/(query|key|value)/bias$", 2, lambda t: t.flatten()),  # heads, head width
    (r"/kernel$", 2, lambda t: t.t()),  # in, out
)


def load_weights(model: nn.Module, path: StrPath, *, strict: bool = True) -> Fit:
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
        state, resized = fit_sizes(_to_timm(state), model)
    return load_state(model, state, path=path, strict=strict, resized=resized)


def _to_timm(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a ViT under timm's names, from whichever dialect they are in."""
    if any(name.startswith("Transformer/") for name in state):
        # The layer before the head does not exist in timm's model.
        kept = {name: _axes_like_torch(name, t) for name, t in state.items() if not name.startswith("pre_logits/")}
        return _join_qkv(translate(kept, _GOOGLE))
    if "conv_proj.weight" in state:
        return translate(state, _TORCHVISION)
    if any(name.endswith("patch_embeddings.projection.weight") for name in state):
        pooled = {name: tensor for name, tensor in state.items() if not name.startswith(("pooler.", "vit.pooler."))}
        return _join_qkv(translate(pooled, _HUGGING_FACE))
    return state


def translate(state: dict[str, Tensor], translation: Translation) -> dict[str, Tensor]:
    """Weights under other names: every pattern of a translation is replaced in turn."""
    renamed = {}
    for name, tensor in state.items():
        for pattern, replacement in translation:
            name = re.sub(pattern, replacement, name)
        renamed[name] = tensor
    return renamed


def _axes_like_torch(name: str, tensor: Tensor) -> Tensor:
    """Flax keeps input axes first and heads as an axis."""
    for pattern, num_axes, turned in _FLAX_AXES:
        if re.search(pattern, name):
            if tensor.dim() != num_axes:
                raise UserError(f"the checkpoint's {name} has shape {tuple(tensor.shape)}: need {num_axes} axes")
            return turned(tensor).contiguous()
    return tensor


def _join_qkv(state: dict[str, Tensor]) -> dict[str, Tensor]:
    joined = {name: tensor for name, tensor in state.items() if not re.search(r"\.attn\.[qkv]\.", name)}
    for name in state:
        if ".attn.q." in name:
            names = [name.replace(".attn.q.", f".attn.{part}.") for part in "qkv"]
            if not all(part in state for part in names):
                raise UserError(f"the checkpoint has {name} without its keys or values: it is incomplete")
            shapes = {state[part].shape for part in names}
            if len(shapes) > 1 or not state[name].dim():
                raise UserError(f"the checkpoint's {name} and its keys and values are of different shapes")
            joined[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat([state[part] for part in names])
    return joined


def fit_sizes(state: dict[str, Tensor], model: VisionTransformer) -> tuple[dict[str, Tensor], tuple[str, ...]]:
    """Resizes position embeddings and patch filters to those of ``model``; the names of what was resized."""
    # Name -> the axes in which its size may differ, and how it is resized.
    resizers: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
        "pos_embed": ((1,), lambda tensor: _resize_positions(tensor, model)),
        "patch_embed.proj.weight": ((2, 3), lambda t: resample_patch_embed(t, list(model.patch_embed.patch_size))),
    }
    state, resized = dict(state), []
    own = model.state_dict()
    for name, (axes, resize) in resizers.items():
        if name in state and name in own and _is_resizable(state[name], own[name], axes):
            fitting = resize(state[name])
            if fitting.shape == own[name].shape:
                state[name] = fitting
                resized.append(name)
    return state, tuple(resized)


def _is_resizable(tensor: Tensor, own: Tensor, axes: tuple[int, ...]) -> bool:
    """Whether a weight differs from the model's own in these axes only."""
    if tensor.dim() != own.dim() or not tensor.is_floating_point() or not tensor.numel():
        return False
    different = {axis for axis in range(own.dim()) if tensor.shape[axis] != own.shape[axis]}
    return bool(different) and different <= set(axes)


def _resize_positions(positions: Tensor, model: VisionTransformer) -> Tensor:
    num_prefix_tokens = 0 if model.no_embed_class else model.num_prefix_tokens
    num_patches = positions.shape[1] - num_prefix_tokens
    if num_patches < 1 or math.isqrt(num_patches) ** 2 != num_patches:
        return positions  # not those of a square image: they are reported as they are
    resized: Tensor = resample_abs_pos_embed(
        positions, new_size=list(model.patch_embed.grid_size), num_prefix_tokens=num_prefix_tokens
    )
    return resized
