"""The training task: images and captions find each other; the best epoch is chosen on the dev split.

The loss is symmetric and contrastive, over one process or many, of CLIP's pairs or of its rivals'.

Letters: B pairs of this process, G pairs of all processes, D width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.nn.functional import all_gather

from ermoe.analysis.recorder import record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.shard_order import order_of
from ermoe.errors import UserError
from ermoe.nn import moe_layers
from ermoe.nn.sharding import unshard, whole
from ermoe.retrieval.captioned import CaptionedBatch, CaptionedImages, CaptionedSource
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.clip.towers import tokenise
from ermoe.retrieval.encode import encode_images, encode_tokens, image_transform
from ermoe.retrieval.figures import retrieve, wide
from ermoe.retrieval.presets import RetrievalRecipe
from ermoe.retrieval.rivals.long_clip import primary_components
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from ermoe.train.loop import Task, settle_on


class Contrastive(Task):
    """Trains a CLIP with one caption an image and epoch; batches and texts follow from the seed.

    With a frozen text tower every text is encoded once. The test split is no part of it.
    """

    goal = "rsum"

    def __init__(self, model: CLIP, data: CaptionedImages, recipe: RetrievalRecipe, compute: Compute) -> None:
        _check(recipe)
        training = recipe.training
        self.model: nn.Module = model
        self.clip = model
        self.recipe = recipe
        self.compute = compute
        self.objective = OBJECTIVES[recipe.variant]
        self.lr_scales = {"visual.trunk.": recipe.image_lr}
        self.train_set, self.dev_set = data.splits(model.visual.image_size[0])
        self.source = CaptionedSource(
            image_transform(model, recipe.augmentation, training.seed).of(self.train_set.images),
            self.train_set,
            context_length=model.context_length,
            seed=training.seed,
            needs_long=self.objective.needs_long,
        )
        order = order_of(data.train.images, training.batch_size, training.seed, shuffle=recipe.shuffle)
        self.loader: Loader[CaptionedBatch] = Loader(self.source, order, compute=compute)
        self._dev_TL = tokenise(self.dev_set.texts, model.context_length).id_TL
        compute.say(self._introduction())

    def _introduction(self) -> str:
        lines = [self.train_set.summary, self.dev_set.summary]
        if num_cut := self.source.num_cut:
            share = num_cut / len(self.train_set.texts)
            lines.append(f"{num_cut:,} captions ({share:.1%}) are longer than {self.clip.context_length} tokens: cut")
        if self.clip.text_is_frozen:
            lines.append("the text tower is frozen: every text is encoded once")
        return "\n".join(lines)

    @property
    def steps_per_epoch(self) -> int:
        return self.loader.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[CaptionedBatch]]:
        """The epoch's batches, after what a frozen text tower has to say is known."""
        if self.clip.text_is_frozen and self.source.feature_RD is None:
            unshard(self.clip)
            self.source.feature_RD = encode_tokens(self.clip, self.source.token_RL, compute=self.compute)
        return self.loader.epoch(epoch, first_step=first_step)

    def loss(self, network: nn.Module, batch: CaptionedBatch) -> Tensor:
        """The sum of the contrastive losses of the objective's pairs."""
        self.clip.limit_scale()
        dtype = self.clip.logit_scale.dtype
        masked = {"masked_share": self.objective.masked_share} if self.objective.masked_share else {}
        image_BD, text_BD, scale = network(batch.image.to(dtype), batch.text, **masked)
        if text_BD is None:
            assert batch.feature is not None
            text_BD = batch.feature.to(dtype)
        losses = [
            contrastive_loss(image, text, scale, label_smoothing=self.recipe.label_smoothing)
            for image, text in self.objective.pairs(image_BD, text_BD)
        ]
        return torch.stack(losses).sum()

    def settle(self) -> str | None:
        """Offsets for images as they are, from some of the training set: the same ones on every process."""
        plain = image_transform(self.clip).of(self.train_set.images)
        return settle_on(self.clip.visual, plain, self.compute.device)

    def evaluate(self) -> dict[str, float]:
        """Retrieval within the dev split, the temperature and, of a sparse model, the routing of its images."""
        if not moe_layers(self.model):
            return self._retrieval()
        with record_routing(self.model, probe_tokens=0) as recorder:
            figures = self._retrieval()
        return figures | over_layers(recorder.reduce().summary())

    def _retrieval(self) -> dict[str, float]:
        batch_size = self.recipe.training.batch_size
        image_ID = encode_images(self.clip, self.dev_set.images, batch_size=batch_size, compute=self.compute)
        text_TD = encode_tokens(self.clip, self._dev_TL, compute=self.compute)
        figures = retrieve(image_ID, text_TD, self.dev_set.text_to_image_T).figures()
        return {**figures, "scale": whole(self.clip.logit_scale).exp().item()}


def _check(recipe: RetrievalRecipe) -> None:
    training = recipe.training
    if training.batch_size < 2:
        raise UserError(f"batch_size={training.batch_size}: pairs are told apart from each other; need at least 2")
    if training.accumulate > 1:
        raise UserError(
            f"accumulate={training.accumulate}: parts of a batch would not be each other's negatives; use a smaller "
            "batch, or more processes"
        )
    if recipe.augmentation.mixes:
        raise UserError("mixup and cutmix have no caption for a mixed image: set both to 0")


def contrastive_loss(
    image_BD: Tensor, text_BD: Tensor, scale: Tensor | float, *, label_smoothing: float = 0.0
) -> Tensor:
    """Half the cross-entropy of each image among all texts plus half that of each text among all images.

    Features have unit length; ``scale`` is the inverse temperature. With several processes every one holds its own
    pairs and meets the features of all; the mean over processes, which is what DDP and FSDP take of gradients, is
    the loss of one large batch, and so are its gradients.

    >>> pair = torch.eye(2)
    >>> round(float(contrastive_loss(pair, pair, 1.0)), 4)
    0.3133
    """
    rank = dist.get_rank() if _is_shared() else 0
    target_B = torch.arange(len(image_BD), device=image_BD.device) + rank * len(image_BD)
    image_GD, text_GD = _gathered(image_BD), _gathered(text_BD)
    # At least float32: under autocast, half-precision logits of a large scale lose the small differences.
    with torch.autocast(image_BD.device.type, enabled=False):
        from_image_BG = scale * wide(image_BD) @ wide(text_GD).mT
        from_text_BG = scale * wide(text_BD) @ wide(image_GD).mT
        losses = [
            F.cross_entropy(logit_BG, target_B, label_smoothing=label_smoothing)
            for logit_BG in (from_image_BG, from_text_BG)
        ]
        return (losses[0] + losses[1]) / 2


def _gathered(feature_BD: Tensor) -> Tensor:
    """The features of all processes in the order of their ranks, (G, D); gradients find their way back."""
    # Every process used every feature, so a feature's gradient is the sum of what all processes ask of it.
    return torch.cat(all_gather(feature_BD.contiguous())) if _is_shared() else feature_BD


def _is_shared() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@dataclass(frozen=True, slots=True)
class _Objective:
    """From the features of a batch to the pairs that are contrasted.

    With ``needs_long`` each image comes with a long text, all its captions joined, before a short one; with
    ``masked_share`` each image passes a second time with that share of its patches left out.
    """

    pairs: Callable[[Tensor, Tensor], list[tuple[Tensor, Tensor]]]
    needs_long: bool = False
    masked_share: float = 0.0


def _plain(image_BD: Tensor, text_BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    return [(image_BD, text_BD)]


def _long_clip(image_BD: Tensor, text_2BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Images with long texts, their primary components with short ones."""
    long_BD, short_BD = text_2BD.chunk(2)
    return [(image_BD, long_BD), (primary_components(image_BD), short_BD)]


def _fix_clip_style(image_2BD: Tensor, text_2BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """Whole images with long texts, images of which patches are left out with short ones.

    In the style of Fix-CLIP (Wang et al. 2025), whose code was never released. Its regional prompt tokens, its
    alignment of intermediate layers and its 30 M recaptioned images are not part of this, and its mask ratio is not
    known: figures of this variant are not Fix-CLIP's.
    """
    (whole_BD, masked_BD), (long_BD, short_BD) = image_2BD.chunk(2), text_2BD.chunk(2)
    return [(whole_BD, long_BD), (masked_BD, short_BD)]


OBJECTIVES = {
    "clip": _Objective(_plain),
    "clip-moe": _Objective(_plain),
    "long-clip": _Objective(_long_clip, needs_long=True),
    "fix-clip-style": _Objective(_fix_clip_style, needs_long=True, masked_share=0.5),
}
"""By the variant of a recipe."""
