"""Words in the explorer: images of an index that are nearest to them, with their experts; and captions for experts.

Letters: I images of the index, N of them studied, E experts, C captions, D width of the common space.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ermoe.data.images import Images
from ermoe.explorer.cards import Cards
from ermoe.explorer.look import Change
from ermoe.explorer.pictures import Pictures
from ermoe.explorer.places import model_names
from ermoe.explorer.subject import Subject
from ermoe.files import StrPath

if TYPE_CHECKING:
    from ermoe.retrieval.index import Index

_FOUND, _WORDS, _MOST_CAPTIONS = 12, 5, 1000


@dataclass(slots=True)
class Search:
    """An index, the model that made it as the explorer shows it, and captions to describe experts with."""

    index: Index
    subject: Subject
    captions: Sequence[str] = ()
    _caption_CD: Tensor | None = field(default=None, init=False)

    def find(self, query: str, pictures: Pictures) -> list[dict[str, Any]]:
        """The nearest images, best first, each with the share of its patches that weigh most on each expert."""
        places = {file: number for number, file in enumerate(self.index.files)}
        found = []
        for hit in self.index.search(query, top=min(_FOUND, len(places))):
            picture = pictures.get(str(places[hit.file]))
            seen = self.subject.look(picture, Change())
            shares = [
                torch.bincount(
                    layer.weight_TE[-self.subject.num_patches :].argmax(1), minlength=layer.weight_TE.shape[1]
                )
                for layer in seen.layers.values()
            ]
            told = [(count_E / self.subject.num_patches).tolist() for count_E in shares]
            found.append({"name": picture.name, "label": hit.file, "cosine": hit.cosine, "experts": told})
        return found

    def words(self, cards: Cards, layer: str, expert: int) -> list[str]:
        """Captions nearest to what sets the images apart that an expert takes more of than of others."""
        if not self.captions or not cards.num_images:
            return []
        from ermoe.retrieval.encode import encode_texts
        from ermoe.retrieval.figures import nearest

        if self._caption_CD is None:
            step = max(1, len(self.captions) // _MOST_CAPTIONS)
            self.captions = list(self.captions)[::step][:_MOST_CAPTIONS]
            feature_CD = encode_texts(self.index.model, self.captions)
            self._caption_CD = F.normalize(feature_CD - feature_CD.mean(0), dim=-1)
        rows, count_NE = cards.counts(layer)
        feature_ND = self.index.feature_ID[rows]
        share_N = (count_NE[:, expert] / count_NE.sum(1)).float()
        direction_D = ((share_N - share_N.mean()).unsqueeze(1) * (feature_ND - feature_ND.mean(0))).sum(0)
        direction_D = F.normalize(direction_D, dim=0)
        return [self.captions[place] for place, _ in nearest(direction_D, self._caption_CD, _WORDS)]


def open_search(
    folder: StrPath, captions: StrPath | None = None, *, device: torch.device | str = "cpu"
) -> tuple[Search, Images]:
    """The search in an index, with the tower that sees as its subject, and the images of the index."""
    from ermoe.retrieval.captions.catalogue import open_captions
    from ermoe.retrieval.index import image_files, open_index

    index = open_index(folder, device=device)
    images = image_files(index.root, index.files)
    texts = [] if captions is None else open_captions(captions, split="all").texts
    (name,) = model_names([str(folder)])
    return Search(index, tower(name, index.model, images), texts), images


def tower(name: str, clip: Any, images: Images) -> Subject:
    """The tower that sees, of a model of images and words."""
    from ermoe.retrieval.encode import image_transform

    return Subject(name, clip.visual, image_transform(clip), [], images.classes)
