"""The training task: images and captions find each other; the best epoch is chosen on the dev split.

Letters: B pairs, I images, T texts, L tokens of a text, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ermoe.analysis.recorder import record_routing
from ermoe.analysis.summary import over_layers
from ermoe.data.augmentation import NO_AUGMENTATION, Augmentation
from ermoe.data.order import Indices, Order
from ermoe.errors import UserError
from ermoe.models.calibrate import settle_offsets
from ermoe.nn import moe_layers
from ermoe.nn.sharding import whole
from ermoe.retrieval.captions.schema import CaptionSet
from ermoe.retrieval.clip.model import CLIP
from ermoe.retrieval.clip.tokens import tokenise
from ermoe.retrieval.clip.towers import trim
from ermoe.retrieval.encode import encode_images, encode_tokens, image_transform
from ermoe.retrieval.figures import retrieve
from ermoe.retrieval.losses import contrastive_loss
from ermoe.retrieval.objectives import objective_of
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader, some_batches
from ermoe.train.settings import Training


@dataclass(slots=True)
class Pairs:
    """Images (B, 3, S, S) with the tokens of their texts, or with features of a frozen tower in their place."""

    image: Tensor
    text: Tensor | None
    feature: Tensor | None


class Contrastive:
    """Trains a CLIP with one caption an image and epoch; see `ermoe.train.task.Task`.

    With a frozen text tower every text is encoded once. The test split is no part of it.
    """

    goal = "rsum"

    def __init__(
        self,
        model: CLIP,
        train: CaptionSet,
        dev: CaptionSet,
        settings: Training,
        *,
        augmentation: Augmentation = NO_AUGMENTATION,
        objective: str = "clip",
        label_smoothing: float = 0.0,
        group: Processes | None = None,
        workers: int = 0,
    ) -> None:
        _check(train, dev, settings, augmentation)
        self.model: nn.Module = model
        self.clip = model
        self.train_set, self.dev_set = train, dev
        self.seed, self.batch_size, self.workers = settings.seed, settings.batch_size, workers
        self.objective = objective_of(objective)
        self.label_smoothing = label_smoothing
        self.group = Processes() if group is None else group
        self.loader = Loader(
            image_transform(model, augmentation, settings.seed).of(train.images),
            Order(len(train), settings.batch_size, settings.seed),
            compute=Compute(self.group, workers=workers),
        )
        train_tokens = tokenise(train.texts, model.context_length)
        self._train_TL, self.num_cut = train_tokens.id_TL, train_tokens.num_cut
        self._dev_TL = tokenise(dev.texts, model.context_length).id_TL
        joined = [" ".join(train.texts_of(image)) for image in range(len(train))] if self.objective.needs_long else []
        self._long_IL = tokenise(joined, model.context_length).id_TL
        self._cached: tuple[Tensor, Tensor] | None = None

    @property
    def steps_per_epoch(self) -> int:
        assert self.loader.order is not None
        return self.loader.order.steps_per_epoch

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Pairs]]:
        if self.clip.text_is_frozen and self._cached is None:
            long_ID, short_TD = (
                encode_tokens(self.clip, tokens, group=self.group) for tokens in (self._long_IL, self._train_TL)
            )
            self._cached = long_ID, short_TD
        for (batch,) in self.loader.epoch(epoch, first_step=first_step):
            assert batch.index is not None
            yield [self._with_texts(batch.image, batch.index.numpy(), epoch)]

    def _with_texts(self, image_BCSS: Tensor, image_B: Indices, epoch: int) -> Pairs:
        short_B = torch.from_numpy(self.train_set.one_text_each(image_B, seed=self.seed, epoch=epoch))
        long_B = torch.from_numpy(image_B)
        device, dtype = self.group.device, self.clip.logit_scale.dtype
        image_BCSS = image_BCSS.to(dtype)
        if self._cached is not None:
            long_ID, short_TD = self._cached
            parts = [long_ID[long_B], short_TD[short_B]] if self.objective.needs_long else [short_TD[short_B]]
            return Pairs(image_BCSS, None, torch.cat(parts).to(device, dtype))
        parts = [self._train_TL[short_B]]
        parts = [self._long_IL[long_B], *parts] if self.objective.needs_long else parts
        return Pairs(image_BCSS, trim(torch.cat(parts)).long().to(device), None)

    def loss(self, network: nn.Module, batch: Pairs) -> Tensor:
        """The sum of the contrastive losses of the objective's pairs."""
        self.clip.limit_scale()
        masked = {"masked_share": self.objective.masked_share} if self.objective.masked_share else {}
        image_BD, text_BD, scale = network(batch.image, batch.text, **masked)
        text_BD = batch.feature if text_BD is None else text_BD
        assert text_BD is not None
        losses = [
            contrastive_loss(image, text, scale, label_smoothing=self.label_smoothing)
            for image, text in self.objective.pairs(image_BD, text_BD)
        ]
        return torch.stack(losses).sum()

    def settle(self) -> str | None:
        """Offsets for images as they are, from some of the training set: the same ones on every process."""
        dtype = self.clip.logit_scale.dtype
        plain = some_batches(image_transform(self.clip).of(self.train_set.images), self.group.device)
        is_settled = settle_offsets(self.clip.visual, (batch.image.to(dtype) for batch in plain))
        return "1,024 training images without augmentation, drawn by a hash" if is_settled else None

    def evaluate(self) -> dict[str, float]:
        """Retrieval within the dev split, the temperature and, of a sparse model, the routing of its images."""
        if not moe_layers(self.model):
            return self._retrieval()
        with record_routing(self.model, probe_tokens=0) as recorder:
            figures = self._retrieval()
        return figures | over_layers(recorder.reduce().summary())

    def _retrieval(self) -> dict[str, float]:
        image_ID = encode_images(
            self.clip, self.dev_set.images, batch_size=self.batch_size, workers=self.workers, group=self.group
        )
        text_TD = encode_tokens(self.clip, self._dev_TL, group=self.group)
        figures = retrieve(image_ID, text_TD, self.dev_set.text_to_image_T).figures()
        return {**figures, "scale": whole(self.clip.logit_scale).exp().item()}

    def state_dict(self) -> dict[str, Any]:
        """Nothing: batches and texts follow from the seed."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass


def _check(train: CaptionSet, dev: CaptionSet, settings: Training, augmentation: Augmentation) -> None:
    if settings.batch_size < 2:
        raise UserError(f"batch_size={settings.batch_size}: pairs are told apart from each other; need at least 2")
    if settings.accumulate > 1:
        raise UserError(
            f"accumulate={settings.accumulate}: parts of a batch would not be each other's negatives; use a smaller "
            "batch, or more processes"
        )
    if augmentation.mixes:
        raise UserError("mixup and cutmix have no caption for a mixed image: set both to 0")
    if shared := set(train.ids) & set(dev.ids):
        raise UserError(f"{len(shared)} images are in both train and dev, among them {min(shared)}: mend the splits")
