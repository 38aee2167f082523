"""The arguments of ``timm.create_model``, read off a model.

timm does not keep them. A reader an argument tells what it must have been; what a model does not have, or what cannot
be told, is None. Whether all of them together tell enough is for `ermoe.models.weights.compare` to say.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any

from timm.layers import AttentionRope, GluMlp, SwiGLU
from timm.models.eva import EvaBlock, EvaBlockPostNorm
from timm.models.vision_transformer import VisionTransformer
from torch import nn

from ermoe.models.backbones import SparseBlock, dense_network
from ermoe.models.families.timm_layers import layer_of

Reader = Callable[[Any], Any]
_ROTATIONS = {
    "RotaryEmbeddingCat": ("cat", "axial"),
    "RotaryEmbeddingMixed": ("mixed", "mixed"),
    "RotaryEmbeddingDinoV3": ("dinov3", "dinov3"),
    "RotaryEmbeddingMRope": ("mrope", "mrope"),
}


def arguments_of(model: nn.Module) -> dict[str, Any]:
    """What can be told of the arguments of its class, as plain as JSON."""
    read = {name: _read(_READERS[name], model) for name in _names(type(model)) if name in _READERS}
    return read | ({name: _read(reader, model) for name, reader in _OF_NAFLEX.items()} if _is_naflex(model) else {})


def _names(kind: type[nn.Module]) -> set[str]:
    """The arguments of a class and of those it is derived from, whose constructors may take any and pass them on."""
    derived_from = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base is not nn.Module]
    names = {name for base in derived_from for name in inspect.signature(base.__init__).parameters}
    if "cfg" in names:  # NaFlexVit, most of whose arguments are fields of a configuration
        import timm.models.naflexvit

        names |= {field.name for field in fields(timm.models.naflexvit.NaFlexVitCfg)}
    return names


def _read(reader: Reader, model: Any) -> Any:
    try:
        value = reader(model)
    except (AttributeError, TypeError, IndexError):  # this kind of model has no such thing
        return None
    return list(value) if isinstance(value, tuple) else value


def _first(*readers: Reader) -> Reader:
    """The first that tells something."""
    return lambda model: next((value for reader in readers if (value := _read(reader, model)) is not None), None)


def _has(path: str) -> Reader:
    """Whether there is a module or parameter at a path, and not a stand-in."""

    def read(model: Any) -> bool:
        found = attrgetter(path)(model)
        return found is not None and not isinstance(found, nn.Identity)

    return read


def _rate(path: str) -> Reader:
    """A dropout rate, whatever it drops; 0 where nothing is dropped."""

    def read(model: Any) -> float:
        module = attrgetter(path)(model)
        for name in ("drop_prob", "prob", "p"):
            if hasattr(module, name):
                return float(f"{getattr(module, name):.6g}")  # timm spaces rates in float32
        return 0.0

    return read


def _num_classes(model: Any) -> int:
    """Those of the head, which people replace, ``model.head = nn.Linear(192, 10)``, without telling the model."""
    head = getattr(model, "head", None)
    return head.out_features if isinstance(head, nn.Linear) else int(model.num_classes)


def _network(model: Any) -> Any:
    return dense_network(_block(model))


def _block(model: Any) -> Any:
    return model.blocks[0]


def _attn(name: str) -> Reader:
    return lambda model: attrgetter(name)(_block(model).attn)


def _attn_has(name: str) -> Reader:
    return lambda model: _has(name)(_block(model).attn)


def _ratio(hidden: int, dim: int) -> float:
    """The ratio of which timm makes ``hidden`` again, by rounding ``dim`` times it down."""
    exact = hidden / dim
    return exact if int(dim * exact) == hidden else (hidden + 0.5) / dim


def _mlp_ratio(model: Any) -> float:
    network = _network(model)
    # VisionTransformer counts both halves of a packed gate as hidden width, Eva counts one.
    packed = isinstance(network, GluMlp) and not isinstance(_block(model), EvaBlock)
    return _ratio((2 if packed else 1) * network.fc2.in_features, model.embed_dim)


def _is_gated(model: Any) -> bool:
    return isinstance(_network(model), GluMlp | SwiGLU)


def _qkv_bias(model: Any) -> bool:
    attn = _block(model).attn
    biases = (getattr(attn, "q_bias", None), getattr(attn.qkv, "bias", None), getattr(attn, "q_proj", None))
    return any(bias is not None and getattr(bias, "bias", bias) is not None for bias in biases)


def _init_values(model: Any) -> float:
    block = _block(model)
    return getattr(block, "init_values", None) or getattr(getattr(block, "ls1", None), "init_values", None) or 0.0


def _kv_heads(model: Any) -> list[int]:
    """Of each block: queries may share keys and values."""
    return [block.attn.num_kv_heads for block in model.blocks]


def _of_rope(name: str) -> Reader:
    return lambda model: None if model.rope is None else getattr(model.rope, name, None)


def _rope_type(model: Any) -> str | None:
    of_eva, of_naflex = _ROTATIONS.get(type(model.rope).__name__, (None, "none"))
    return of_naflex if _is_naflex(model) else of_eva


def _act_layer(model: Any) -> Any:
    """Of the networks; gated ones of EVA have their own."""
    return None if isinstance(_block(model), EvaBlock) and _is_gated(model) else layer_of(_network(model).act)


def _of_vit_blocks(reader: Reader) -> Reader:
    """For arguments that blocks of EVA are not given."""
    return lambda model: None if isinstance(_block(model), EvaBlock | EvaBlockPostNorm) else reader(model)


def _dense_class(model: Any) -> type[nn.Module]:
    block = _block(model)
    return block.dense_class if isinstance(block, SparseBlock) else type(block)


def _block_fn(model: Any) -> Any:
    return {"layer": f"timm.models.vision_transformer.{_dense_class(model).__name__}"}


def _is_naflex(model: Any) -> bool:
    return hasattr(model, "embeds")


def _pool_ratio(model: Any) -> float:
    return _ratio(model.attn_pool.mlp.fc1.out_features, model.embed_dim)


# Argument -> how to read it off a model.
_READERS: dict[str, Reader] = {
    # images and tokens
    "img_size": lambda m: m.patch_embed.img_size,
    "patch_size": _first(lambda m: m.patch_embed.patch_size, lambda m: m.embeds.patch_size),
    "in_chans": _first(lambda m: m.in_chans, lambda m: m.patch_embed.proj.in_channels),
    "dynamic_img_size": lambda m: m.dynamic_img_size,
    "dynamic_img_pad": _first(lambda m: m.patch_embed.dynamic_img_pad, lambda m: m.embeds.dynamic_img_pad),
    "embed_layer": lambda m: {"layer": layer_of(m.patch_embed)["layer"]},
    "embed_norm_layer": _first(
        lambda m: layer_of(m.patch_embed.norm) if _has("patch_embed.norm")(m) else None,
        lambda m: layer_of(m.embeds.norm) if _has("embeds.norm")(m) else None,
    ),
    "class_token": _first(lambda m: m.has_class_token, lambda m: m.cls_token is not None),
    "reg_tokens": lambda m: m.num_reg_tokens,
    "num_reg_tokens": lambda m: 0 if m.reg_token is None else m.reg_token.shape[1],
    "no_embed_class": lambda m: m.no_embed_class,
    # positions
    "pos_embed": _first(lambda m: m.embeds.pos_embed_type, lambda m: "none" if m.pos_embed is None else "learn"),
    "use_abs_pos_emb": lambda m: m.pos_embed is not None,
    "use_abs_pos": lambda m: m.pos_embed is not None,
    "use_rot_pos_emb": lambda m: m.rope is not None,
    "use_rope": lambda m: m.rope_global is not None,
    "use_rel_pos": _attn("use_rel_pos"),
    "use_rel_pos_bias": lambda m: _block(m).attn.relative_position_bias_table is not None,
    "use_shared_rel_pos_bias": lambda m: m.rel_pos_bias is not None,
    "rope_type": _rope_type,
    "rope_rotate_half": _attn("rotate_half"),
    "rope_mrope_section": _of_rope("mrope_section"),
    "rope_ref_feat_shape": _of_rope("ref_feat_shape"),
    "ref_feat_shape": _first(
        _of_rope("ref_feat_shape"),
        lambda m: [list(rope.ref_feat_shape) for rope in (m.rope_global, m.rope_window)],
    ),
    **{
        f"rope_{name}": _of_rope(name)
        for name in ("temperature", "grid_offset", "grid_indexing", "shift_coords", "jitter_coords", "rescale_coords")
    },
    # blocks
    "embed_dim": lambda m: m.embed_dim,
    "depth": lambda m: len(m.blocks),
    "block_fn": _of_vit_blocks(_block_fn),
    "norm_layer": lambda m: layer_of(_block(m).norm1),
    "init_values": _init_values,
    "attn_only_layer_scale": lambda m: _block(m).gamma_1 is not None and _block(m).gamma_2 is None,
    "use_post_norm": lambda m: issubclass(_dense_class(m), EvaBlockPostNorm),
    # attention
    "num_heads": _attn("num_heads"),
    "num_kv_heads": _kv_heads,
    "qkv_bias": _qkv_bias,
    "qkv_fused": lambda m: _block(m).attn.qkv is not None,
    "qk_norm": _attn_has("q_norm"),
    "scale_attn_norm": _attn_has("norm"),
    "scale_attn_inner": _attn_has("norm"),
    "scale_attn_inner_norm": _attn_has("norm"),
    "proj_bias": _of_vit_blocks(lambda m: _block(m).attn.proj.bias is not None),
    "attn_gated": _attn_has("gate"),
    "attn_layer": _of_vit_blocks(lambda m: {"layer": layer_of(_block(m).attn)["layer"]}),
    "attn_type": lambda m: "rope" if isinstance(_block(m).attn, AttentionRope) else "eva",
    "use_key_only_attn_mask": lambda m: m.use_key_only_attn_mask,
    "window_size": lambda m: max(block.window_size for block in m.blocks),
    "global_attn_indexes": lambda m: [i for i, block in enumerate(m.blocks) if block.window_size == 0],
    # feed-forward networks
    "mlp_ratio": _mlp_ratio,
    "mlp_layer": _of_vit_blocks(lambda m: layer_of(_network(m))),
    "act_layer": _act_layer,
    "scale_mlp_norm": lambda m: _has("norm")(_network(m)),
    "scale_mlp": lambda m: _has("norm")(_network(m)),
    "swiglu_mlp": lambda m: _is_gated(m) and not isinstance(m, VisionTransformer),
    "swiglu_align_to": lambda m: int(isinstance(_network(m), SwiGLU) and not _has("norm")(_network(m))),
    # what comes before and after
    "pre_norm": _has("norm_pre"),
    "use_pre_transformer_norm": _has("norm_pre"),
    "final_norm": lambda m: _has("norm")(m) or _has("fc_norm")(m),
    "use_post_transformer_norm": _has("norm"),
    "fc_norm": _has("fc_norm"),
    "use_fc_norm": _has("fc_norm"),
    "global_pool": _first(lambda m: m.head.global_pool.pool_type, lambda m: m.global_pool),
    "pool_include_prefix": lambda m: m.pool_include_prefix,
    "attn_pool_num_heads": lambda m: m.attn_pool.num_heads,
    "attn_pool_mlp_ratio": _pool_ratio,
    "num_classes": _num_classes,
    "neck_chans": lambda m: m.neck[0].out_channels if isinstance(m.neck, nn.Sequential) else 0,
    "head_hidden_size": lambda m: m.head.hidden_size,
    # dropout
    "drop_rate": _first(_rate("head_drop"), _rate("head.drop")),
    "pos_drop_rate": _first(_rate("pos_drop"), _rate("embeds.pos_drop")),
    "patch_drop_rate": _rate("patch_drop"),
    "proj_drop_rate": lambda m: _rate("proj_drop")(_block(m).attn),
    "attn_drop_rate": lambda m: _rate("attn_drop")(_block(m).attn),
    "drop_path_rate": lambda m: _rate("drop_path1")(m.blocks[-1]),
}


def _naflex_fc_norm(model: Any) -> bool | None:
    """Both norms are there only if it was left open."""
    before, after = _has("norm")(model), _has("fc_norm")(model)
    return None if before and after else after


def _naflex_attn_type(model: Any) -> str:
    if not isinstance(_block(model), EvaBlock):
        return "standard"
    return "rope" if isinstance(_block(model).attn, AttentionRope) else "eva"


# What NaFlexVit calls the same and means otherwise, or alone has.
_OF_NAFLEX: dict[str, Reader] = {
    "use_naflex": lambda m: True,
    "img_size": lambda m: m.embeds.default_img_size,
    "pos_embed_grid_size": lambda m: None if m.embeds.default_img_size else m.embeds.pos_embed_grid_size,
    "pos_embed_interp_mode": lambda m: m.embeds.pos_embed_interp_mode,
    "pos_embed_ar_preserving": lambda m: m.embeds.pos_embed_ar_preserving,
    "pos_embed_use_grid_sample": lambda m: m.embeds.pos_embed_use_grid_sample,
    "enable_patch_interpolator": lambda m: m.embeds.enable_patch_interpolator,
    "patchify_channels_last": lambda m: m.embeds.channels_last,
    "embed_proj_type": lambda m: "linear" if m.embeds.is_linear else "conv",
    "fc_norm": _naflex_fc_norm,
    "attn_type": _naflex_attn_type,
    "swiglu_mlp": lambda m: isinstance(_block(m), EvaBlock) and _is_gated(m),
}
