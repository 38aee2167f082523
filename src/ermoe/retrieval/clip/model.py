"""The model: two towers that meet in one space, and a temperature.

Letters: B images or texts, L tokens of a text, D width of the common space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import timm
import torch
import torch.nn.functional as F
from open_clip.model import CustomTextCLIP
from torch import Tensor, nn

import ermoe.models.vit  # noqa: F401 (its import tells timm of the sparse models)
from ermoe.errors import UserError
from ermoe.retrieval.captions.schema import id_hashes
from ermoe.retrieval.clip.towers import ImageTower, TextTower
from ermoe.retrieval.presets import TextShape

_START_SCALE = math.log(1 / 0.07)
_LARGEST_SCALE = math.log(100)
UNKNOWN_PRETRAINING = "unknown pretraining"
"""Stands among the ids of training images for those of weights from elsewhere."""


class CLIP(CustomTextCLIP):
    """open_clip's model with a timm trunk, which `ermoe.upcycle` makes sparse and `ermoe.save` writes down.

    ``trained_on`` holds hashes of the ids of all images it was ever trained on, as part of its weights, so that an
    evaluation can refuse to meet them again.

    Args:
        trunk: a timm VisionTransformer without a classifier (``num_classes=0``).
        text: the shape of the text tower.
        embed_dim: width D of the common space.
        num_training_images: how many ids ``trained_on`` is to hold.

    >>> trunk = timm.create_model("test_vit", num_classes=0)
    >>> model = CLIP(trunk, TextShape(context_length=8, width=32, heads=2, layers=1), embed_dim=16)
    >>> image, text, scale = model(torch.randn(2, 3, 160, 160), torch.ones(2, 8, dtype=torch.long))
    >>> image.shape, text.shape, round(scale.item(), 2)
    (torch.Size([2, 16]), torch.Size([2, 16]), 14.29)
    """

    # Not a matter of training: DDP would send it around at every step.
    _ddp_params_and_buffers_to_ignore = frozenset({"trained_on"})

    def __init__(self, trunk: Any, text: TextShape, embed_dim: int = 512, *, num_training_images: int = 0) -> None:
        nn.Module.__init__(self)  # open_clip's own would build the towers by name, without arguments
        if trunk.num_classes:
            raise UserError(f"the image tower has a classifier for {trunk.num_classes} classes: use num_classes=0")
        self.output_dict = False
        self.visual = ImageTower(trunk, embed_dim)
        self.text = TextTower(text, embed_dim)
        self.context_length, self.vocab_size = text.context_length, text.vocab_size
        self.logit_scale = nn.Parameter(torch.full([1], _START_SCALE))  # FSDP has no parameters without axes
        self.logit_bias = None
        self.register_buffer("trained_on", torch.zeros(num_training_images, dtype=torch.int64))
        self.trained_on: Tensor
        self.text_experts: dict[str, Any] | None = None  # see ermoe.retrieval.rivals.clip_moe

    @property
    def embed_dim(self) -> int:
        """Width of the common space, D."""
        return int(self.text.output_dim)

    @property
    def text_is_frozen(self) -> bool:
        """Whether no parameter of the text tower learns."""
        return not any(parameter.requires_grad for parameter in self.text.parameters())

    def freeze_text(self) -> None:
        """From now on the text tower does not change: no gradients, no weight decay, no dropout."""
        self.text.requires_grad_(False)
        self.train(self.training)

    def train(self, mode: bool = True) -> CLIP:
        """Training mode; a frozen text tower stays in evaluation mode."""
        super().train(mode)
        if self.text_is_frozen:
            self.text.eval()
        return self

    def forward(
        self, image: Tensor | None = None, text: Tensor | None = None, *, masked_share: float = 0.0
    ) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """Features of unit length (B, D) of images and of texts, either may be left out, and the scale.

        With ``masked_share`` images pass a second time with that share of their patches left out, and the features
        of the second pass follow those of the first, (2B, D).
        """
        image_BD = None
        if image is not None:
            image_BD = self.encode_image(image, normalize=True)
            if masked_share:
                with self.visual.dropping_patches(masked_share):
                    image_BD = torch.cat([image_BD, self.encode_image(image, normalize=True)])
        text_BD = None if text is None else self.encode_text(text, normalize=True)
        return image_BD, text_BD, self.logit_scale.exp()

    def encode_image(self, image: Tensor, normalize: bool = False) -> Tensor:
        """Features of images, (B, D)."""
        feature_BD = self.visual(image)
        return F.normalize(feature_BD, dim=-1) if normalize else feature_BD

    @torch.no_grad()
    def limit_scale(self) -> None:
        """Keeps the scale between 1 and 100, as CLIP does after every step."""
        self.logit_scale.clamp_(0, _LARGEST_SCALE)

    def remember(self, ids: Iterable[str]) -> None:
        """Adds images to those it was trained on."""
        known = torch.cat([self.trained_on.cpu(), id_hashes(ids)])
        self.trained_on = torch.unique(known).to(self.trained_on.device)


def create_clip(
    architecture: str,
    text: TextShape,
    *,
    embed_dim: int = 512,
    image_args: Mapping[str, Any] | None = None,
    seed: int = 0,
) -> CLIP:
    """A dense CLIP with fresh weights; ``image_args`` go to `timm.create_model`."""
    torch.manual_seed(seed)
    return CLIP(timm.create_model(architecture, num_classes=0, **(image_args or {})), text, embed_dim)
