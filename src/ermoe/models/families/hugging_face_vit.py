"""Vision transformers of Hugging Face's transformers 5: ViT, DeiT, ViTMAE, BEiT, DINOv2, DINOv3, CLIP, SigLIP (2).

Their blocks are alike: x + branch(attention(norm(x))), then x + branch(mlp(norm(x))). A family here is a declaration of
the names it has for these, of its branch (dropout, LayerScale, stochastic depth) and of what it does to attention.

Letters: B sequences, N tokens, D model width, P width of a flat patch, h heads, d width of a head.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.beit import modeling_beit as beit
from transformers.models.clip import modeling_clip as clip
from transformers.models.deit import modeling_deit as deit
from transformers.models.dinov2 import modeling_dinov2 as dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers as dinov2_with_registers
from transformers.models.dinov3_vit import modeling_dinov3_vit as dinov3
from transformers.models.siglip import modeling_siglip as siglip
from transformers.models.siglip2 import modeling_siglip2 as siglip2
from transformers.models.vit import modeling_vit as vit
from transformers.models.vit_mae import modeling_vit_mae as vit_mae

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.backbones import Family, SparseBlock, children_at
from ermoe.nn.ffn import FFN, Linear

_MODULES = (vit, deit, vit_mae, beit, dinov2, dinov2_with_registers, dinov3, clip, siglip, siglip2)


class SparseLayer(SparseBlock):
    """A sparse block around one of Hugging Face's attention modules; what is not said otherwise is as in ViT."""

    networks: tuple[type[nn.Module], ...]  # the dense ones that experts can replace
    parts = ("layernorm_before", "attention", "layernorm_after")
    dropout: Any

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        norm_before, attention, norm_after = (getattr(self, name) for name in self.parts)
        attended, alpha_BNN = self._attention(attention, norm_before(hidden_states), attention_mask, **kwargs)
        x = hidden_states + self.branch(attended, 1)
        mixed = self.mix(norm_after(x), alpha_BNN, attended, self.real_tokens(attention_mask, x))
        return x + self.branch(mixed, 2)

    def branch(self, x_BND: Tensor, number: int) -> Tensor:
        """What happens to the output of attention (1) or of the experts (2) before it is added."""
        out: Tensor = self.dropout(x_BND)
        return out

    def rotated(self, q: Tensor, k: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Queries and keys with their positions, in families that turn them."""
        return q, k

    def real_tokens(self, mask: Tensor | None, x_BND: Tensor) -> Tensor | None:
        """Which tokens are more than padding, (B, N), in families that pad."""
        return None

    def _attention(self, attn: Any, x_BND: Tensor, mask: Tensor | None, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        dropout = _either(attn, "attention_dropout", "dropout") if self.training else 0.0
        # The eager implementation shows its weights, after dropout, and so does output_attentions=True.
        if not self.needs_weights or (attn.config._attn_implementation == "eager" and dropout == 0):
            attended, weights_BhNN = attn(x_BND, attention_mask=mask, **kwargs)
            if not self.needs_weights:
                return attended, None
            alpha_BNN = weights_BhNN.mean(1)
            return attended, alpha_BNN if self.context_grad else alpha_BNN.detach()
        q, k, v = (
            projection(x_BND).unflatten(-1, (-1, attn.head_dim)).transpose(1, 2)
            for projection in (attn.q_proj, attn.k_proj, attn.v_proj)
        )
        q, k = self.rotated(q, k, **kwargs)
        scale = _either(attn, "scaling", "scale")
        out, alpha_BNN = self.attend(q, k, v, bias=_bias(mask), scale=scale, dropout=dropout)
        return _either(attn, "o_proj", "out_proj")(out.transpose(1, 2).flatten(2)), alpha_BNN


def _either(module: Any, *names: str) -> Any:
    """The first of these attributes that a module has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise UserError(f"{type(module).__name__} has no {' or '.join(names)}: install transformers 5.18 or newer")


def _bias(mask: Any) -> Tensor | None:
    """A mask as `attend` takes it: boolean, True where a token may look, or added to the logits."""
    if mask is None:
        return None
    if not isinstance(mask, Tensor):  # flex attention's
        raise UserError(
            f"attention is masked by a {type(mask).__name__}, under which weights cannot be shown: call "
            "model.set_attn_implementation('sdpa')"
        )
    return mask.bool()[:, None, None, :] if mask.dim() == 2 else mask  # flash attention's: which keys are real


class SparseViTLayer(SparseLayer, vit.ViTLayer):
    """ViT's layer with experts."""

    dense_class, networks = vit.ViTLayer, (vit.ViTMLP,)


class SparseDeiTLayer(SparseLayer, deit.DeiTLayer):
    """DeiT's layer with experts."""

    dense_class, networks = deit.DeiTLayer, (deit.DeiTMLP,)


class SparseViTMAELayer(SparseLayer, vit_mae.ViTMAELayer):
    """A layer of ViTMAE's encoder with experts."""

    dense_class, networks = vit_mae.ViTMAELayer, (vit_mae.ViTMAEMLP,)


class SparseBeitLayer(SparseLayer, beit.BeitLayer):
    """BEiT's layer with experts: relative positions are added to the logits of attention."""

    dense_class, networks = beit.BeitLayer, (beit.BeitMLP,)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        interpolate_pos_encoding: bool = False,
        resolution: tuple[int, int] | None = None,
        **kwargs: Any,
    ) -> Tensor:
        if self.relative_position_bias is not None:
            assert resolution is not None
            patch: Any = self.patch_size
            window = (resolution[0] // patch, resolution[1] // patch)
            bias = self.relative_position_bias(window, interpolate_pos_encoding, dim_size=hidden_states.shape[1])
            attention_mask = bias if attention_mask is None else bias + attention_mask
        return super().forward(hidden_states, attention_mask, **kwargs)

    def branch(self, x_BND: Tensor, number: int) -> Tensor:
        scale = self.lambda_1 if number == 1 else self.lambda_2
        out: Tensor = self.drop_path(scale * self.dropout(x_BND))
        return out


class _DinoLayer(SparseLayer):
    """DINO's layers: LayerScale and stochastic depth."""

    parts = ("norm1", "attention", "norm2")
    drop_path: Any
    layer_scale1: Any
    layer_scale2: Any

    def branch(self, x_BND: Tensor, number: int) -> Tensor:
        scaled = self.layer_scale1(x_BND) if number == 1 else self.layer_scale2(x_BND)
        out: Tensor = self.drop_path(scaled)
        return out


class SparseDinov2Layer(_DinoLayer, dinov2.Dinov2Layer):
    """DINOv2's layer with experts, gated or not."""

    dense_class, networks = dinov2.Dinov2Layer, (dinov2.Dinov2MLP, dinov2.Dinov2SwiGLUFFN)


class SparseDinov2WithRegistersLayer(_DinoLayer, dinov2_with_registers.Dinov2WithRegistersLayer):
    """The same with registers."""

    dense_class = dinov2_with_registers.Dinov2WithRegistersLayer
    networks = (
        dinov2_with_registers.Dinov2WithRegistersMLP,
        dinov2_with_registers.Dinov2WithRegistersSwiGLUFFN,
    )


class SparseDINOv3ViTLayer(_DinoLayer, dinov3.DINOv3ViTLayer):  # type: ignore[misc] # forward by other names
    """DINOv3's layer with experts, gated or not: patches are turned by their position."""

    dense_class, networks = dinov3.DINOv3ViTLayer, (dinov3.DINOv3ViTMLP, dinov3.DINOv3ViTGatedMLP)

    def rotated(self, q: Tensor, k: Tensor, **kwargs: Any) -> tuple[Tensor, Tensor]:
        return dinov3.apply_rotary_pos_emb(q, k, *kwargs["position_embeddings"])


class _TowerLayer(SparseLayer):
    """Layers of image towers beside a text tower: nothing happens to a branch."""

    parts = ("layer_norm1", "self_attn", "layer_norm2")

    def branch(self, x_BND: Tensor, number: int) -> Tensor:
        return x_BND


class SparseCLIPEncoderLayer(_TowerLayer, clip.CLIPEncoderLayer):  # type: ignore[misc] # its mask is no option
    """CLIP's layer with experts."""

    dense_class, networks = clip.CLIPEncoderLayer, (clip.CLIPMLP,)


class SparseSiglipEncoderLayer(_TowerLayer, siglip.SiglipEncoderLayer):
    """SigLIP's layer with experts."""

    dense_class, networks = siglip.SiglipEncoderLayer, (siglip.SiglipMLP,)


class SparseSiglip2EncoderLayer(_TowerLayer, siglip2.Siglip2EncoderLayer):
    """SigLIP 2's layer with experts. Images of different sizes are padded: no expert meets the padding."""

    dense_class, networks = siglip2.Siglip2EncoderLayer, (siglip2.Siglip2MLP,)

    def real_tokens(self, mask: Tensor | None, x_BND: Tensor) -> Tensor | None:
        bias = _bias(mask)
        if bias is None:
            return None
        may_look = bias if bias.dtype == torch.bool else bias > torch.finfo(bias.dtype).min / 2
        return may_look.any(dim=(1, 2)).expand(x_BND.shape[:2])  # a token is real if any other may look at it


_SPARSE: dict[type[nn.Module], type[SparseLayer]] = {
    sparse.dense_class: sparse
    for sparse in (
        SparseViTLayer,
        SparseDeiTLayer,
        SparseViTMAELayer,
        SparseBeitLayer,
        SparseDinov2Layer,
        SparseDinov2WithRegistersLayer,
        SparseDINOv3ViTLayer,
        SparseCLIPEncoderLayer,
        SparseSiglipEncoderLayer,
        SparseSiglip2EncoderLayer,
    )
}
_ATTENTIONS = (None, "eager", "sdpa", "flex_attention")  # the implementations, beside flash attention, that are softmax
# Names a tower has for the list of its layers.
_LAYERS = ("layers", "encoder.layers", "encoder.layer", "model.layer")


class HuggingFace(Family):
    """What all models of transformers have: a class and a configuration, from which they are built again."""

    def mark(self, model: Any, sparsity: Any, whole: nn.Module) -> None:
        from ermoe.models import hugging_face  # which builds sparse models, and so asks here

        hugging_face.mark(model, sparsity, whole)

    def is_built_by(self, whole: nn.Module, model: Any) -> bool:
        from ermoe.models import hugging_face

        return hugging_face.is_built_by(whole, model)


class HuggingFaceViT(HuggingFace):
    """Blocks are the layers of the tower that sees. The dropout of their feed-forward networks stays with them."""

    library = "transformers'"

    def sparse_class(self, block: Any) -> type[SparseLayer]:
        return next(_SPARSE[base] for base in type(block).__mro__ if base in _SPARSE)

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        path, tower = _tower(model)
        layers = next(layers for layers in _LAYERS if _has(tower, layers))
        return children_at(model, f"{path}.{layers}" if path else layers)

    def refusal(self, block: Any) -> str | None:
        kind, network = type(block), type(block.mlp)
        if kind not in _SPARSE:
            known = next((base.__name__ for base in kind.__mro__ if base in _SPARSE), "layer")
            return f"it is a {kind.__name__}, not {self.library} {known}"
        if network not in (networks := _SPARSE[kind].networks):
            known = " or ".join(network.__name__ for network in networks)
            return f"its feed-forward network is a {network.__name__}, not {self.library} {known}"
        return None

    def no_context(self, block: Any) -> str | None:
        attention: Any = self.attention(block)
        kind = attention.config._attn_implementation
        if kind in _ATTENTIONS or kind.startswith("flash_attention"):
            return None
        return (
            f"its attention is computed by {kind!r}, whose weights ermoe does not know; call "
            "model.set_attn_implementation('sdpa'), or use score='prototype' or score='energy', which leave attention "
            "to itself"
        )

    def ffn(self, block: Any) -> FFN:
        mlp = block.mlp
        gate = Linear.of(mlp.gate_proj) if hasattr(mlp, "gate_proj") else None
        norm = getattr(block, self.sparse_class(block).parts[-1])
        up, down = _either(mlp, "fc1", "up_proj"), _either(mlp, "fc2", "down_proj")
        act = _either(mlp, "activation_fn", "act_fn")
        return FFN(up=Linear.of(up), down=Linear.of(down), gate=gate, act=act, norm=norm)

    def see(self, model: Any, batch: Tensor | dict[str, Tensor]) -> Any:
        """Of two towers, only the one that sees is run, unless there is text; SigLIP 2 takes images as flat patches."""
        _, tower = _tower(model)
        if isinstance(batch, Tensor):
            batch = _flat_patches(batch, tower.config) if _is_flat(tower) else {"pixel_values": batch}
        is_image_alone = hasattr(model, "text_model") and "input_ids" not in batch
        return (tower if is_image_alone else model)(**batch)

    def num_tokens(self, model: Any) -> int:
        _, tower = _tower(model)
        config, embeddings = tower.config, tower.embeddings
        sizes = zip(self.image_size(model), _pair(config.patch_size), strict=True)
        height, width = (edge // patch for edge, patch in sizes)
        named = sum(hasattr(embeddings, name) for name in ("cls_token", "class_embedding", "distillation_token"))
        registers = getattr(embeddings, "register_tokens", None)
        shown = 1 - getattr(config, "mask_ratio", 0.0)  # ViTMAE hides most of its patches
        return named + (0 if registers is None else registers.shape[1]) + int(height * width * shown)

    def image_size(self, model: Any) -> tuple[int, ...]:
        _, tower = _tower(model)
        if _is_flat(tower):
            return _pair(tower.embeddings.position_embedding_size * tower.config.patch_size)
        return _pair(tower.config.image_size)

    def describe(self, model: Any) -> Json:
        """The class and its configuration."""
        return describe(model)

    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        return build(classes_of(*_MODULES), description, device=device)


def classes_of(*modules: ModuleType) -> dict[str, Any]:
    """The models that modules of transformers offer, by name."""
    return {name: getattr(module, name) for module in modules for name in module.__all__}


def describe(model: Any, *, whole: bool = False) -> Json:
    """The dense class of a model and its configuration, with the kind of attention where that is not the usual one.

    ``options`` are what its constructor was given beside the configuration. A ``whole`` configuration also has what is
    as in any other.
    """
    from ermoe.models.hugging_face import dense_class, dense_config, options_of

    config = dense_config(model.config)
    is_eager = config._attn_implementation == "eager"
    return {
        "class": dense_class(model).__name__,
        "config": {
            **(config.to_dict() if whole else config.to_diff_dict()),
            **({"attn_implementation": "eager"} if is_eager else {}),
        },
        **({"options": options} if (options := options_of(model)) else {}),
    }


def build(classes: dict[str, Any], description: Json, *, device: str) -> nn.Module:
    """The model of one of ``classes``, which are transformers' own, with the configuration of a description."""
    name = description["class"]
    if name not in classes:
        raise UserError(f"{name} is none of the classes of transformers that ermoe knows: {', '.join(classes)}")
    config = classes[name].config_class.from_dict(description["config"])
    for part in _configurations(config):
        attention = part._attn_implementation
        if attention not in (None, "eager", "sdpa"):  # any other name may be that of a repository
            raise UserError(f"attn_implementation={attention!r}: write 'eager' or 'sdpa' into config.json")
    options = description.get("options", {})
    if not isinstance(options, dict) or any(not isinstance(value, bool) for value in options.values()):
        raise UserError(f"options={options!r}: the constructor of {name} is told true or false: save the model again")
    if unknown := [option for option in options if option not in inspect.signature(classes[name]).parameters]:
        raise UserError(f"{name} of transformers has no option {unknown[0]!r}: save the model again")
    with torch.device(device):
        model: nn.Module = classes[name](config, **options)
    return model


def _configurations(config: Any) -> Iterable[Any]:
    """A configuration and those inside it."""
    yield config
    for value in vars(config).values():
        if isinstance(value, PreTrainedConfig):
            yield from _configurations(value)


def _tower(model: Any) -> tuple[str, Any]:
    """The part of a model that embeds images and holds the layers, with its name in the model."""
    for path in ("", getattr(model, "base_model_prefix", ""), "vision_model"):
        if _has(model, path) and hasattr(tower := model.get_submodule(path), "embeddings"):
            if not hasattr(tower.config, "patch_size"):
                raise UserError(f"{type(model).__name__} reads text: ermoe makes towers sparse that see images")
            return path, tower
    raise UserError(f"{type(model).__name__} is a part of a model: pass the whole model, which embeds images")


def _has(module: nn.Module, path: str) -> bool:
    try:
        module.get_submodule(path)
    except AttributeError:
        return False
    return True


def _pair(size: Any) -> tuple[int, int]:
    height, width = size if isinstance(size, Iterable) else (size, size)
    return int(height), int(width)


def _is_flat(tower: Any) -> bool:
    """Whether a tower takes images as flat patches."""
    return isinstance(tower.embeddings, siglip2.Siglip2VisionEmbeddings)


def _flat_patches(images: Tensor, config: Any) -> dict[str, Any]:
    """Images, all of one size, as SigLIP 2's processor hands them over: patches (B, N, P), rows first, colours last."""
    size = config.patch_size
    height, width = (edge // size for edge in images.shape[-2:])
    grid = images[..., : height * size, : width * size].unflatten(-2, (height, size)).unflatten(-1, (width, size))
    patches_BNP = grid.permute(0, 2, 4, 3, 5, 1).flatten(3).flatten(1, 2)
    shapes = torch.tensor([[height, width]] * len(images), device="cpu")
    return {"pixel_values": patches_BNP, "pixel_attention_mask": None, "spatial_shapes": shapes}


FAMILY = HuggingFaceViT()
