"""Training the paper's two image-level rivals, which learn in two stages, within the one loop.

DeepMoE-style networks first learn with all of their loss, then with their gates fixed. Single-gated ones first train
their base, then cluster its embeddings, freeze it and train the experts. Here the second stage begins halfway.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ermoe.data.augment import Batch
from ermoe.errors import UserError
from ermoe.images.presets import ImageRecipe
from ermoe.images.rivals.image_level import ImageLevel
from ermoe.images.rivals.single_gated import SingleGatedMoEStyle
from ermoe.images.run import Classification, LabelledImages, transform_for
from ermoe.train.compute import Compute
from ermoe.train.loader import some_batches

_CLUSTERED_IMAGES = 20_000


class TwoStageClassification(Classification):
    """Classification by a network that brings its own loss and its own second stage. One process only."""

    model: ImageLevel

    def __init__(self, model: ImageLevel, data: LabelledImages, recipe: ImageRecipe, compute: Compute) -> None:
        super().__init__(model, data, recipe, compute)
        if compute.group.num > 1:
            raise UserError("single-gated and DeepMoE-style networks train in one process: start without torchrun")
        self.second_stage_from = recipe.training.epochs // 2
        self.in_second_stage = False

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Batch]]:
        """The epoch's batches, after the change of stage if it is due."""
        if epoch >= self.second_stage_from and not self.in_second_stage:
            if isinstance(self.model, SingleGatedMoEStyle):
                self.model.start_from_clusters(self._plain_images(), seed=self.recipe.training.seed)
            self._begin_second_stage()
        return super().batches(epoch, first_step)

    def _begin_second_stage(self) -> None:
        self.model.begin_second_stage()
        self.in_second_stage = True

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The network's own loss, which knows its stage."""
        return self.model.loss(batch.image, batch.label)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "in_second_stage": self.in_second_stage}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if state["in_second_stage"]:
            self._begin_second_stage()

    def _plain_images(self) -> Iterator[Tensor]:
        """Training images without augmentation, in an order that mixes the classes."""
        training = self.recipe.training
        source = transform_for(self.model).of(self.train_images)
        drawn = some_batches(
            source, self.compute.device, num_items=_CLUSTERED_IMAGES, batch_size=training.batch_size, seed=training.seed
        )
        yield from (batch.image for batch in drawn)
