"""The training task: images and captions find each other; the best epoch is chosen on the dev split."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.analysis.recorder import record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.order import Order
from ermoe.errors import UserError
from ermoe.nn import moe_layers
from ermoe.nn.sharding import whole
from ermoe.retrieval.captioned import CaptionedBatch, CaptionedImages, CaptionedSource
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.clip.tokens import tokenise
from ermoe.retrieval.encode import encode_images, encode_tokens, image_transform
from ermoe.retrieval.figures import retrieve
from ermoe.retrieval.losses import OBJECTIVES, contrastive_loss
from ermoe.retrieval.presets import RetrievalRecipe
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from ermoe.train.loop import settle_on


class Contrastive:
    """Trains a CLIP with one caption an image and epoch; see `ermoe.train.loop.Task`.

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
        self.train_set, self.dev_set = data.splits(model.visual.image_size[0])
        self.source = CaptionedSource(
            image_transform(model, recipe.augmentation, training.seed).of(self.train_set.images),
            self.train_set,
            context_length=model.context_length,
            seed=training.seed,
            needs_long=self.objective.needs_long,
        )
        order = Order(len(self.train_set), training.batch_size, training.seed)
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

    def state_dict(self) -> dict[str, Any]:
        """Nothing: batches and texts follow from the seed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


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
