"""Named recipes: towers, what they start from, and how they are trained; each a function that says what it is for.

The paper gives no recipe for CLIP-ERMoE beyond "ImageNet-pretrained image tower, frozen CLIP text tower"; the numbers
here are ours. Within a family nothing differs but the method.

Nothing here imports torch, so that a command can show the values of a preset at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from ermoe.errors import UserError, unknown_name
from ermoe.train.settings import STEADY_BASES, Augmentation, Training, from_scratch

if TYPE_CHECKING:
    from ermoe.retrieval.captioned import CaptionedImages
    from ermoe.retrieval.clip.model import CLIP
    from ermoe.retrieval.contrastive import Contrastive
    from ermoe.train.compute import Compute

VARIANTS = ("clip", "clip-moe", "long-clip", "fix-clip-style")


@dataclass(frozen=True, slots=True)
class TextShape:
    """The size of a text tower; defaults are those of CLIP ViT-B.

    OpenAI's weights need ``quick_gelu``, most others do not, and a mistake costs accuracy without any error.
    """

    context_length: int = 77
    vocab_size: int = 49408
    width: int = 512
    heads: int = 8
    layers: int = 12
    quick_gelu: bool = False

    def __post_init__(self) -> None:
        for name in ("context_length", "vocab_size", "width", "heads", "layers"):
            if getattr(self, name) < 1:
                raise UserError(f"text tower: {name}={getattr(self, name)}; need at least 1")
        if self.width % self.heads:
            raise UserError(f"text tower: heads={self.heads} do not divide width={self.width}")


@dataclass(frozen=True, slots=True)
class RetrievalRecipe:
    """Everything but the data.

    Args:
        architecture: of the image tower, a model of timm.
        text: shape of the text tower.
        training: the numbers of the loop; batches are not accumulated, because pairs are each other's negatives.
        augmentation: how training images are varied; they are not mixed, because a mixed image has no caption.
        sparsity: options of `ermoe.upcycle`; None leaves the image tower dense.
        embed_dim: width of the common space.
        image_args: options of the architecture.
        init: what experts start from without weights: "same" from scratch; with weights it is always "dense".
        text_tower: "frozen" or "tuned".
        variant: "clip", or a rival: "clip-moe" (experts in both towers, only gates learn), "long-clip" (248 tokens,
            primary components), "fix-clip-style" (two branches).
        label_smoothing: share of a pair's weight that is spread over all pairs.
        shuffle: "all" training images, or "shards", where every process reads tar files of its own, each from front to
            back: for storage that is slow to read at random.
        image_lr: factor on the learning rate of the image tower without its projection, for one that knows something
            beside a text tower that knows nothing.
        weights: a CLIP file for both towers, or for the text tower if image weights are given; of deit-tiny a ViT file
            for the image tower.
        weights_of: what ``weights`` are of, "clip" or "image-tower".
        image_weights: a file with weights of a ViT for the image tower.
        text_from: a run or model folder of ours whose text tower is taken over.
        preset: the name it had.
    """

    architecture: Annotated[str, tyro.conf.Suppress]
    text: Annotated[TextShape, tyro.conf.Suppress]
    training: Training
    augmentation: Augmentation
    sparsity: Annotated[Mapping[str, Any] | None, tyro.conf.Suppress] = None
    embed_dim: Annotated[int, tyro.conf.Suppress] = 512
    image_args: Annotated[Mapping[str, Any], tyro.conf.Suppress] = field(default_factory=dict)
    init: Annotated[str, tyro.conf.Suppress] = "dense"
    text_tower: Annotated[str, tyro.conf.Suppress] = "tuned"
    variant: Annotated[str, tyro.conf.Suppress] = "clip"
    label_smoothing: float = 0.0
    shuffle: Literal["all", "shards"] = "all"
    image_lr: float = 1.0
    weights: str | None = None
    weights_of: Annotated[str, tyro.conf.Suppress] = "clip"
    image_weights: str | None = None
    text_from: str | None = None
    preset: Annotated[str, tyro.conf.Suppress] = "own"

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise UserError(f"variant={self.variant!r}: use one of {', '.join(VARIANTS)}")
        if self.text_tower not in ("frozen", "tuned"):
            raise UserError(f"text_tower={self.text_tower!r}: use 'frozen' or 'tuned'")
        if self.weights_of not in ("clip", "image-tower"):
            raise UserError(f"weights_of={self.weights_of!r}: use 'clip' or 'image-tower'")
        if self.image_lr < 0:
            raise UserError(f"image_lr={self.image_lr}: need 0 (a frozen image tower) or more")
        if self.variant == "clip-moe" and self.sparsity is not None:
            raise UserError("variant='clip-moe' brings experts of its own: leave sparsity at None")

    def build(self, **starts: str | None) -> CLIP:
        """The model before training; ``weights``, ``image_weights`` and ``text_from``, if given, instead of its own."""
        from ermoe.retrieval.build import build

        return build(replace(self, **starts))  # type: ignore[arg-type]

    def task(self, data: CaptionedImages, compute: Compute) -> Contrastive:
        """Contrastive training on ``data``, whose images the model remembers from then on."""
        from ermoe.retrieval.contrastive import Contrastive

        model = self.build()
        model.remember(data.train.ids)
        return Contrastive(model, data, self, compute)


_SMALL_TEXT = TextShape(context_length=32, width=128, heads=4, layers=2)
_SMALL_IMAGE = {"img_size": 96, "patch_size": 16, "embed_dim": 128, "depth": 4, "num_heads": 4, "global_pool": "avg"}


def small(sparsity: dict[str, Any] | None, *, text_tower: str = "tuned") -> RetrievalRecipe:
    """Two small towers for images of 96 pixels, from scratch within minutes: Flickr8k.

    Run: ``ermoe retrieve train small-METHOD flickr8k --protocol flickr8k-1k``. ``small-METHOD-frozen`` takes a trained
    text tower (``--text-from``) and leaves it as it is. Figures: benchmarks/results/flickr8k.jsonl.
    """
    return RetrievalRecipe(
        "vit_tiny_patch16_224",
        _SMALL_TEXT,
        Training(
            epochs=12, batch_size=64, base_lr=2e-3, weight_decay=0.1, warmup_epochs=1.0, ema=0.99, log_every=46,
            orthogonality_every=10, **STEADY_BASES,
        ),
        Augmentation(crop="resized"),
        from_scratch(sparsity),
        embed_dim=128,
        image_args=_SMALL_IMAGE,
        init="same",
        text_tower=text_tower,
    )  # fmt: skip


def deit_tiny(sparsity: dict[str, Any] | None, *, text_tower: str = "tuned") -> RetrievalRecipe:
    """DeiT-Tiny's own weights in the image tower, at 96 pixels, and a small text tower from scratch: Flickr8k.

    Run: ``ermoe retrieve train deit-tiny-METHOD flickr8k --protocol flickr8k-1k --weights FILE --cache``, with timm's
    deit_tiny_patch16_224 as FILE. Experts are upcycled from the same weights; ``deit-tiny-METHOD-frozen`` takes a
    trained text tower besides (``--text-from``). Half of the patches are left out in training: a step is twice as
    fast, and an image is not learnt by heart. Figures: benchmarks/results/flickr8k_deit.jsonl.
    """
    return RetrievalRecipe(
        "deit_tiny_patch16_224",
        TextShape(context_length=40, width=192, heads=3, layers=3),
        Training(
            epochs=8, batch_size=64, base_lr=4e-3, weight_decay=0.1, warmup_epochs=1.0, ema=0.99, log_every=46,
            orthogonality_every=10,
        ),
        Augmentation(),
        sparsity,
        embed_dim=192,
        image_args={"img_size": 96, "patch_drop_rate": 0.5},
        text_tower=text_tower,
        image_lr=0.1,
        weights_of="image-tower",
    )  # fmt: skip


def tiny(sparsity: dict[str, Any] | None, *, text_tower: str = "tuned", variant: str = "clip") -> RetrievalRecipe:
    """A toy of 32 pixels, to see a whole run in seconds."""
    return RetrievalRecipe(
        "vit_tiny_patch16_224",
        TextShape(context_length=16 if variant != "long-clip" else 77, width=32, heads=2, layers=2),
        Training(epochs=2, batch_size=8, base_lr=2e-2, warmup_epochs=0.5, ema=0.9, log_every=2, **STEADY_BASES),
        Augmentation(),
        from_scratch(sparsity),
        embed_dim=32,
        image_args={"img_size": 32, "patch_size": 8, "embed_dim": 32, "depth": 2, "num_heads": 2, "global_pool": "avg"},
        init="same",
        text_tower=text_tower,
        variant=variant,
    )


_FINE_TUNING = Training(epochs=10, batch_size=1024, base_lr=1.25e-5, weight_decay=0.1, warmup_epochs=1.0, ema=0.999)


def b16(
    sparsity: dict[str, Any] | None, *, quick_gelu: bool, text_tower: str = "frozen", variant: str = "clip"
) -> RetrievalRecipe:
    """CLIP ViT-B/16, both towers from one CLIP file, the image tower upcycled: the same outputs before training.

    Run: ``ermoe retrieve train openai-b16-METHOD COCO --protocol coco-karpathy-5k --weights FILE``. OpenAI's weights
    want QuickGELU (openai-b16), LAION's GELU (laion-b16). Needs GPUs.
    """
    architecture = "vit_base_patch16_clip_quickgelu_224" if quick_gelu else "vit_base_patch16_clip_224"
    return RetrievalRecipe(
        architecture,
        TextShape(quick_gelu=quick_gelu),
        _FINE_TUNING,
        Augmentation(crop="resized"),
        sparsity,
        text_tower=text_tower,
        variant=variant,
        label_smoothing=0.1 if variant != "clip" else 0.0,
    )


def paper_b16(sparsity: dict[str, Any] | None, *, text_tower: str = "frozen") -> RetrievalRecipe:
    """The paper's setting: an ImageNet ViT-B/16 image tower, upcycled, with a new projection; CLIP's text tower frozen.

    Run: ``ermoe retrieve train imagenet-b16-METHOD-frozen COCO --protocol coco-karpathy-5k --weights CLIP_FILE
    --image-weights VIT_FILE``. Needs GPUs. The paper does not say how it was trained; this is our recipe.
    """
    return RetrievalRecipe(
        "vit_base_patch16_224",
        TextShape(quick_gelu=True),
        Training(epochs=30, batch_size=1024, base_lr=1.25e-4, weight_decay=0.1, warmup_epochs=2.0, ema=0.999),
        Augmentation(crop="resized"),
        sparsity,
        text_tower=text_tower,
    )


METHODS: dict[str, dict[str, Any] | None] = {
    "ermoe": {"balance": "offset"},
    "ermoe-none": {"balance": "none"},
    "v-moe": {"router": "v-moe"},
    "dense": None,
}
_FAMILIES: dict[str, Callable[..., RetrievalRecipe]] = {
    "small": small,
    "deit-tiny": deit_tiny,
    "tiny": tiny,
    "openai-b16": partial(b16, quick_gelu=True),
    "laion-b16": partial(b16, quick_gelu=False),
    "imagenet-b16": paper_b16,
}
PRESETS: Mapping[str, Callable[[], RetrievalRecipe]] = {
    f"{family}-{method}{suffix}": partial(build, sparsity, text_tower=text_tower)
    for family, build in _FAMILIES.items()
    for method, sparsity in METHODS.items()
    for suffix, text_tower in (("", "tuned"), ("-frozen", "frozen"))
} | {
    f"{family}-{variant}": partial(_FAMILIES[family], None, text_tower="tuned", variant=variant)
    for family in ("tiny", "openai-b16", "laion-b16")
    for variant in VARIANTS[1:]
}


ABOUT_METHODS = {
    "ermoe": "experts in the image tower route by their own eigenbasis; offsets steer towards equal load",
    "ermoe-none": "the same without offsets: the paper's rule",
    "v-moe": "V-MoE in the image tower",
    "dense": "both towers without experts",
    "…-frozen": "the text tower comes from --weights or --text-from and is left as it is",
    "clip-moe": "CLIP-MoE: experts in both towers, of which only the gates learn",
    "long-clip": "Long-CLIP: 248 tokens of text, and primary components",
    "fix-clip-style": "two branches, for long and short captions",
}


def recipe(name: str) -> RetrievalRecipe:
    """The recipe called ``name``.

    >>> recipe("small-v-moe").sparsity
    {'router': 'v-moe'}
    """
    if name not in PRESETS:
        raise unknown_name("preset", name, PRESETS, listed_by="ermoe retrieve presets")
    return replace(PRESETS[name](), preset=name)
