"""Named recipes: towers, what they start from, and how they are trained; each a function that says what it is for.

The paper gives no recipe for CLIP-ERMoE beyond "ImageNet-pretrained image tower, frozen CLIP text tower"; the numbers
here are ours. Within a family nothing differs but the method.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from ermoe.data.augmentation import Augmentation
from ermoe.errors import UserError
from ermoe.models.io import load
from ermoe.models.scratch import from_scratch, restart_ffns
from ermoe.models.upcycle import upcycle
from ermoe.models.weights.foreign import load_weights
from ermoe.retrieval.clip.model import CLIP, UNKNOWN_PRETRAINING, create_clip
from ermoe.retrieval.clip.towers import TextShape
from ermoe.retrieval.clip.weights import load_clip_weights
from ermoe.retrieval.rivals import clip_moe, long_clip
from ermoe.train.settings import STEADY_BASES, Training

VARIANTS = ("clip", "clip-moe", "long-clip", "fix-clip-style")


@dataclass(frozen=True, slots=True)
class Recipe:
    """Everything but the data.

    Args:
        architecture, image_args: of the image tower, for `timm.create_model`.
        text: shape of the text tower.
        embed_dim: width of the common space.
        sparsity: options of `ermoe.upcycle`; None leaves the image tower dense.
        init: what experts start from without weights: "same" from scratch; with weights it is always "dense".
        text_tower: "frozen" or "tuned".
        variant: "clip", or a rival: "clip-moe" (experts in both towers, only gates learn), "long-clip" (248 tokens,
            primary components), "fix-clip-style" (two branches).
    """

    architecture: str
    text: TextShape
    training: Training
    augmentation: Augmentation
    sparsity: dict[str, Any] | None = None
    embed_dim: int = 512
    image_args: dict[str, Any] = field(default_factory=dict)
    init: str = "dense"
    text_tower: str = "tuned"
    variant: str = "clip"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        if self.variant not in VARIANTS:
            raise UserError(f"variant={self.variant!r}: use one of {', '.join(VARIANTS)}")
        if self.text_tower not in ("frozen", "tuned"):
            raise UserError(f"text_tower={self.text_tower!r}: use 'frozen' or 'tuned'")
        if self.variant == "clip-moe" and self.sparsity is not None:
            raise UserError("variant='clip-moe' brings experts of its own: leave sparsity at None")

    @property
    def objective(self) -> str:
        """The name of its objective; CLIP-MoE's is CLIP's."""
        return "clip" if self.variant == "clip-moe" else self.variant

    def build(
        self, *, weights: str | None = None, image_weights: str | None = None, text_from: str | None = None
    ) -> CLIP:
        """The model before training.

        ``weights`` is a CLIP file for both towers, or for the text tower if ``image_weights`` names a file for the
        image tower; ``text_from`` is the folder of a CLIP of ours whose text tower is taken over.
        """
        model = create_clip(
            self.architecture, self.text, embed_dim=self.embed_dim, image_args=self.image_args, seed=self.training.seed
        )
        if self.init == "same" and weights is None:
            restart_ffns(model, torch.Generator().manual_seed(self.training.seed))
        if weights is not None:
            load_clip_weights(model, weights, parts=("image", "text") if image_weights is None else ("text",))
        if image_weights is not None:
            _load_image_tower(model, image_weights)
        if text_from is not None:
            _take_text_tower(model, text_from)
        if self.text_tower == "frozen" and weights is None and text_from is None:
            raise UserError("a frozen text tower must know something: give --weights of a CLIP, or --text-from a run")
        return self._finish(model, init=self.init if weights is None else "dense")

    def _finish(self, model: CLIP, *, init: str) -> CLIP:
        generator = torch.Generator().manual_seed(self.training.seed)
        if self.variant == "long-clip":
            long_clip.stretch_positions(model)
        if self.variant == "clip-moe":
            model = clip_moe.clip_moe(model, generator=generator)
            clip_moe.train_only_gates(model)
        elif self.sparsity is not None:
            upcycle(model, init=init, inplace=True, generator=generator, **self.sparsity)
        if self.text_tower == "frozen":
            model.freeze_text()
        return model


def _load_image_tower(model: CLIP, path: str) -> None:
    fit = load_weights(model.visual.trunk, path, strict=False)
    model.remember([UNKNOWN_PRETRAINING])
    if fit.missing:
        raise UserError(
            f"{path} lacks {fit.missing[0]} ({len(fit.missing)} such): it holds weights of another image tower"
        )


def _take_text_tower(model: CLIP, folder: str) -> None:
    other = load(folder)
    if not isinstance(other, CLIP) or other.text.shape != model.text.shape or other.embed_dim != model.embed_dim:
        raise UserError(f"{folder} has no text tower of this shape: name a run of the same preset family")
    model.text.load_state_dict(other.text.state_dict())
    with torch.no_grad():
        model.logit_scale.copy_(other.logit_scale)
    model.trained_on = other.trained_on.clone()  # what its text tower has seen counts


_SMALL_TEXT = TextShape(context_length=32, width=128, heads=4, layers=2)
_SMALL_IMAGE = {"img_size": 96, "patch_size": 16, "embed_dim": 128, "depth": 4, "num_heads": 4, "global_pool": "avg"}


def small(sparsity: dict[str, Any] | None, *, text_tower: str = "tuned") -> Recipe:
    """Two small towers for images of 96 pixels, from scratch within minutes: Flickr8k.

    Run: ``ermoe retrieve train small-METHOD flickr8k --protocol flickr8k-1k``. ``small-METHOD-frozen`` takes a trained
    text tower (``--text-from``) and leaves it as it is. Figures: benchmarks/results/flickr8k.jsonl.
    """
    return Recipe(
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


def tiny(sparsity: dict[str, Any] | None, *, text_tower: str = "tuned", variant: str = "clip") -> Recipe:
    """A toy of 32 pixels, to see a whole run in seconds."""
    return Recipe(
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
) -> Recipe:
    """CLIP ViT-B/16, both towers from one CLIP file, the image tower upcycled: the same outputs before training.

    Run: ``ermoe retrieve train openai-b16-METHOD COCO --protocol coco-karpathy-5k --weights FILE``. OpenAI's weights
    want QuickGELU (openai-b16), LAION's GELU (laion-b16). Needs GPUs.
    """
    architecture = "vit_base_patch16_clip_quickgelu_224" if quick_gelu else "vit_base_patch16_clip_224"
    return Recipe(
        architecture,
        TextShape(quick_gelu=quick_gelu),
        _FINE_TUNING,
        Augmentation(crop="resized"),
        sparsity,
        text_tower=text_tower,
        variant=variant,
        label_smoothing=0.1 if variant != "clip" else 0.0,
    )


def paper_b16(sparsity: dict[str, Any] | None, *, text_tower: str = "frozen") -> Recipe:
    """The paper's setting: an ImageNet ViT-B/16 image tower, upcycled, with a new projection; CLIP's text tower frozen.

    Run: ``ermoe retrieve train imagenet-b16-METHOD-frozen COCO --protocol coco-karpathy-5k --weights CLIP_FILE
    --image-weights VIT_FILE``. Needs GPUs. The paper does not say how it was trained; this is our recipe.
    """
    return Recipe(
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
_FAMILIES: dict[str, Callable[..., Recipe]] = {
    "small": small,
    "tiny": tiny,
    "openai-b16": partial(b16, quick_gelu=True),
    "laion-b16": partial(b16, quick_gelu=False),
    "imagenet-b16": paper_b16,
}
PRESETS: dict[str, Callable[[], Recipe]] = {}
for _family, _build in _FAMILIES.items():
    for _method, _sparsity in METHODS.items():
        PRESETS[f"{_family}-{_method}"] = partial(_build, _sparsity, text_tower="tuned")
        PRESETS[f"{_family}-{_method}-frozen"] = partial(_build, _sparsity, text_tower="frozen")
    if _family in ("tiny", "openai-b16", "laion-b16"):
        for _variant in VARIANTS[1:]:
            PRESETS[f"{_family}-{_variant}"] = partial(_build, None, text_tower="tuned", variant=_variant)


def recipe(name: str) -> Recipe:
    """The recipe called ``name``.

    >>> recipe("small-v-moe").sparsity
    {'router': 'v-moe'}
    """
    if name not in PRESETS:
        raise UserError(f"there is no preset {name!r}: use FAMILY-METHOD, one of {', '.join(PRESETS)}")
    return PRESETS[name]()
