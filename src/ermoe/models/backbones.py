"""Backbones seen alike: where a family keeps its blocks, and a block's feed-forward network, dense or sparse.

An adapter a family, found by where a model's class is defined, shows a block's dense network through its weights. A
block becomes sparse in place. It keeps its modules, parameter names, hooks and settings; its feed-forward network
``mlp`` becomes an expert layer, and its class a subclass whose forward hands that layer the context.

Letters: B sequences, N tokens, D model width, h heads, d width of a head.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from importlib import import_module
from typing import Any

from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.files import Json
from ermoe.models.weights.compare import difference
from ermoe.nn import Context, MixtureLayer, attend
from ermoe.nn.ffn import FFN

CONTEXT_SOURCES = ("features", "attention")
_ATTENTIONS = ("attn", "attention", "self_attention", "self_attn")  # what libraries call it


class SparseBlock(nn.Module):
    """Mixin of a transformer block whose feed-forward network ``mlp`` is a mixture of experts.

    ``context_of`` says what the attention weights average: the "features" that enter the expert layer, or the output
    of the "attention". With ``context_grad=False`` the weights α carry no gradient, and attention itself stays fused.
    """

    dense_class: type[nn.Module]
    mlp: Any  # a MixtureLayer, where the dense block has a network of its own
    context_of: str
    context_grad: bool
    windowed = False  # whether tokens look around in windows of their own, where their contexts are averaged

    # The dense network without its weights, in a tuple so that torch does not take it for a submodule.
    _skeleton: tuple[nn.Module]

    @property
    def needs_weights(self) -> bool:
        """Whether the router asks where tokens looked; if not, the backbone's own attention runs untouched."""
        layer: MixtureLayer = self.mlp
        return layer.needs_context

    def mix(
        self, z_BND: Tensor, alpha_BNN: Tensor | None, attended_BND: Tensor, mask_BN: Tensor | None = None
    ) -> Tensor:
        """The expert layer on ``z_BND``, with the context its router asks for (Eq. 2)."""
        context = None
        if alpha_BNN is not None:
            context = Context(alpha_BNN) if self.context_of == "features" else Context(alpha_BNN, attended_BND)
        mixed_BND: Tensor = self.mlp(z_BND, context, mask_BN)
        return mixed_BND

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None = None, scale: float, dropout: float
    ) -> tuple[Tensor, Tensor]:
        """Attention outputs (B, h, N, d) and the head-mean weights α (B, N, N)."""
        return attend(q, k, v, bias=bias, scale=scale, dropout=dropout, weights_grad=self.context_grad)


def dense_network(block: Any) -> nn.Module:
    """The feed-forward module of a dense block, or what is left of it in a sparse one: everything but its weights."""
    return block._skeleton[0] if isinstance(block, SparseBlock) else block.mlp


def sparsify(
    block: Any, layer: MixtureLayer, sparse_class: type[SparseBlock], *, context_of: str, context_grad: bool
) -> None:
    """Puts an expert layer in the place of the block's feed-forward network."""
    skeleton = copy.deepcopy(block.mlp.to("meta"))
    block.__class__ = sparse_class
    block.context_of, block.context_grad = context_of, context_grad
    block._skeleton = (skeleton,)
    block.mlp = layer.train(block.training)


def densify(block: Any) -> None:
    """Undoes `sparsify`, except that the weights of the dense network are yet to be written."""
    reference = next(block.mlp.parameters())
    (skeleton,) = block._skeleton
    block.mlp = copy.deepcopy(skeleton).to_empty(device=reference.device).to(reference.dtype).train(block.training)
    block.__class__ = block.dense_class
    for name in ("_skeleton", "context_of", "context_grad"):
        delattr(block, name)


class Family(ABC):
    """How one family of backbones is laid out; what is not said otherwise is as in timm.

    Models and blocks of other libraries are `Any`: torch does not type the attributes of modules.
    """

    sparse_block: type[SparseBlock]
    network: type[nn.Module]  # the dense one that experts can replace
    library: str  # whose these two are

    def sparse_class(self, block: Any) -> type[SparseBlock]:
        """What a block becomes when it becomes sparse, in families with several kinds of blocks."""
        return self.sparse_block

    def see(self, model: Any, batch: Tensor | dict[str, Tensor]) -> Any:
        """What the model says to a batch of images, or of keyword arguments; of two towers, the one that sees."""
        return call(model, batch)

    def bound_to(self, model: Any) -> Family:
        """The adapter for one model; another than itself where that depends on what the model holds."""
        return self

    def backbone(self, model: Any) -> nn.Module:
        """The transformer itself, which says how it is sparse: the model, or a part of it."""
        backbone: nn.Module = model
        return backbone

    def blocks(self, model: Any) -> list[tuple[str, nn.Module]]:
        """The transformer blocks from input to output, with their names in the model."""
        return children_at(model, "blocks")

    def attention(self, block: Any) -> nn.Module | None:
        """The module whose work a sparse block does itself when its router needs a context."""
        return next((getattr(block, name) for name in _ATTENTIONS if hasattr(block, name)), None)

    def refusal(self, block: Any) -> str | None:
        """Why this block cannot be made sparse, as the end of a sentence about it; None if it can."""
        known = self.sparse_class(block).dense_class
        if type(block) is not known:
            return f"it is a {type(block).__name__}, not {self.library} {known.__name__}"
        network = type(block.mlp)
        if network is not self.network:
            return f"its feed-forward network is a {network.__name__}, not {self.library} {self.network.__name__}"
        return None

    def no_context(self, block: Any) -> str | None:
        """Why its attention cannot say where tokens looked; None if it can."""
        return None

    @abstractmethod
    def ffn(self, block: Any) -> FFN:
        """The feed-forward network of a dense block, as views of its parameters."""

    @abstractmethod
    def num_tokens(self, model: Any) -> int:
        """Length of the sequence at the model's own image size."""

    @abstractmethod
    def image_size(self, model: Any) -> tuple[int, ...]:
        """The model's own size of images (height, width) or volumes."""

    def channels(self, model: Any) -> int:
        """Channels of the images it takes."""
        return next((m.in_channels for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), 3)

    def unsavable(self, model: Any) -> str | None:
        """What `ermoe.save` would have to say against this dense model, once it is sparse; None if nothing."""
        try:
            rebuilt = self.build(self.describe(model), device="meta").to(next(model.parameters()).dtype)
        except UserError as problem:
            lost: object = problem
        except Exception as problem:  # whatever another library makes of a description that was read wrongly
            lost = f"it is not built again ({str(problem).partition(chr(10))[0][:120]})"
        else:
            lost = difference(model, rebuilt)
        return None if lost is None else f"ermoe.save will not write this {type(model).__name__}: {lost}"

    def mark(self, model: Any, sparsity: Any, whole: nn.Module) -> None:  # noqa: B027 (most libraries do not ask)
        """Tells the library of a backbone how it is sparse, an `ermoe.models.upcycle.Sparsity`; None: not any more.

        ``whole`` is the model that holds it, or itself.
        """

    def is_built_by(self, whole: nn.Module, model: Any) -> bool:
        """Whether a library's own model around ``model`` is saved and built again with it, sparse or not."""
        return False

    @abstractmethod
    def describe(self, model: Any) -> Json:
        """What it takes to build the model's dense form again, as plain as JSON."""

    @abstractmethod
    def build(self, description: Json, *, device: str = "cpu") -> nn.Module:
        """The dense model a description means, freshly initialised."""


def call(model: nn.Module, batch: Tensor | dict[str, Tensor]) -> Any:
    """What a model says to images, or to keyword arguments by name."""
    return model(**batch) if isinstance(batch, dict) else model(batch)


def children_at(model: nn.Module, path: str) -> list[tuple[str, nn.Module]]:
    """The children of the container at a dotted path, with their full names."""
    try:
        container = model.get_submodule(path)
    except AttributeError:
        raise UserError(f"this {type(model).__name__} has no {path}: pass a whole model, not a part of one") from None
    return [(f"{path}.{name}", block) for name, block in container.named_children()]


# Name in config.json -> the module whose ``FAMILY`` is the adapter, and those that define its models' classes or their
# bases. Those of applications are known by their address alone: loading such a model imports its application, and
# nothing else does.
FAMILIES: dict[str, tuple[str, ...]] = {
    "timm_vit": ("ermoe.models.families.timm_vit", "timm.models.vision_transformer"),
    "timm_eva": ("ermoe.models.families.timm_eva", "timm.models.eva"),
    "timm_beit": ("ermoe.models.families.timm_beit", "timm.models.beit"),
    "timm_sam": ("ermoe.models.families.timm_sam", "timm.models.vision_transformer_sam"),
    "timm_naflex": ("ermoe.models.families.timm_naflex", "timm.models.naflexvit"),
    "timm_features": ("ermoe.models.families.timm_features", "timm.models._features"),
    "torchvision_vit": ("ermoe.models.families.torchvision_vit", "torchvision.models.vision_transformer"),
    "hugging_face_vit": (
        "ermoe.models.families.hugging_face_vit",
        "transformers.models.vit.modeling_vit",
        "transformers.models.deit.modeling_deit",
        "transformers.models.vit_mae.modeling_vit_mae",
        "transformers.models.beit.modeling_beit",
        "transformers.models.dinov2.modeling_dinov2",
        "transformers.models.dinov2_with_registers.modeling_dinov2_with_registers",
        "transformers.models.dinov3_vit.modeling_dinov3_vit",
        "transformers.models.clip.modeling_clip",
        "transformers.models.siglip.modeling_siglip",
        "transformers.models.siglip2.modeling_siglip2",
    ),
    "hugging_face_timm": (
        "ermoe.models.families.hugging_face_timm",
        "transformers.models.timm_wrapper.modeling_timm_wrapper",
    ),
    "open_clip": ("ermoe.models.families.open_clip", "open_clip.model", "open_clip.timm_model"),
    "open_clip_vit": ("ermoe.models.families.open_clip_vit", "open_clip.transformer"),
    "volume": ("ermoe.models.vit3d", "ermoe.models.vit3d"),
    "clip": ("ermoe.retrieval.clip.adapter", "ermoe.retrieval.clip.model"),
    "whole": (
        "ermoe.models.families.whole",
        "ermoe.brain.rivals.sfcn",
        "ermoe.brain.rivals.swin3d",
        "ermoe.images.rivals.single_gated",
        "ermoe.images.rivals.deep_moe",
    ),
}
_NAMES = {home: name for name, (_, *homes) in FAMILIES.items() for home in homes}


def family_name(model: nn.Module) -> str:
    """The family of a model, as a saved model calls it.

    >>> import timm
    >>> family_name(timm.create_model("test_vit"))
    'timm_vit'
    """
    name = known_family(model)
    if name is None:
        raise UserError(
            f"{type(model).__module__}.{type(model).__name__} is no backbone ermoe knows, nor does it hold one: use a "
            "vision transformer of timm, torchvision, Hugging Face or open_clip (docs/reference/backbones.md), or put "
            "ermoe.EigenMoE into blocks of your own"
        )
    return name


def known_family(model: nn.Module) -> str | None:
    """The name of a model's family; None if its class is of none."""
    return next((_NAMES[base.__module__] for base in type(model).__mro__ if base.__module__ in _NAMES), None)


def family_of(model: nn.Module) -> Family:
    """The adapter for a model, or for the one backbone that it holds."""
    name = known_family(model)
    if name is not None:
        return family_named(name).bound_to(model)
    from ermoe.models.inside import inside  # which asks here what a part of the model is

    return inside(model)


def family_named(name: str) -> Family:
    """The adapter of the name that a saved model gives.

    >>> type(family_named("timm_vit")).__name__
    'TimmViT'
    """
    if name not in FAMILIES:
        raise UserError(f"config.json names the unknown backbone family {name!r}: ermoe knows {', '.join(FAMILIES)}")
    adapter, home, *_ = FAMILIES[name]
    try:
        family: Family = import_module(adapter).FAMILY
    except ImportError as problem:
        library = home.partition(".")[0]
        raise UserError(f"this version of {library} is not one ermoe knows ({problem}): upgrade {library}") from problem
    return family
