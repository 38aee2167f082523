"""Which images and captions a retrieval figure is about. Protocols have names and sizes, and are never mixed.

Figures of two protocols cannot be compared: the same model finds 82 % of captions among 1,000 images of Flickr30k and
far fewer among 31,783. Sizes are checked whenever data are opened.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ermoe.errors import UserError


@dataclass(frozen=True, slots=True)
class Protocol:
    """A named pool of images and captions.

    Args:
        about: what the pool is.
        sizes: (images, captions) of each split; a split without a size is not checked, a split that is not in
            ``files`` does not exist.
        files: names of caption files, most telling first, for each split. ``*`` is any file.
        first_captions: only so many captions of an image count; None for all.
        is_whole: the pool is the whole file, whatever splits it knows.
        hashed_splits: splits that are drawn by a hash of image ids, because nobody published them.
    """

    name: str
    about: str
    sizes: Mapping[str, tuple[int, int]]
    files: Mapping[str, tuple[str, ...]]
    first_captions: int | None = None
    is_whole: bool = False
    hashed_splits: Mapping[str, tuple[float, float]] = field(default_factory=dict)

    def own_files(self, split: str) -> set[str]:
        """Names of files that are this split and no other."""
        others = {name for other, names in self.files.items() if other != split for name in names}
        return set(self.files[split]) - others

    def check(self, split: str, num_images: int, num_captions: int, source: str) -> None:
        """Raises unless a split has the protocol's size."""
        expected = self.sizes.get(split)
        if expected is not None and expected != (num_images, num_captions):
            raise UserError(
                f"{source} has {num_images:,} images with {num_captions:,} captions for the split {split!r}, and "
                f"{self.name} is {expected[0]:,} with {expected[1]:,}: use the file this protocol is made of, or "
                "--protocol custom, whose figures go by their own size"
            )


def _in_splits(*patterns: str) -> dict[str, tuple[str, ...]]:
    """Files of train, dev and test; where a name has {}, every split has a file of its own."""
    written = {"train": "train", "dev": "val", "test": "test"}
    return {split: tuple(pattern.format(name) for pattern in patterns) for split, name in written.items()}


PROTOCOLS: dict[str, Protocol] = {
    protocol.name: protocol
    for protocol in (
        Protocol(
            "coco-karpathy-5k",
            "Karpathy's test split of COCO: 5,000 images of val2014, all captions (a few images have six)",
            {"train": (113_287, 566_747), "dev": (5_000, 25_010), "test": (5_000, 25_010)},
            _in_splits("dataset_coco.json", "coco_karpathy_{}.json", "coco_{}_karpathy.json"),
        ),
        Protocol(
            "coco-val2017-5k",
            "COCO val2017, the first five captions of each image; its images can be in Karpathy's training split",
            {"test": (5_000, 25_000)},
            {"train": ("captions_train2017.json",), "dev": ("captions_train2017.json",)}
            | {"test": ("captions_val2017.json",)},
            first_captions=5,
            hashed_splits={"train": (0.0, 0.96), "dev": (0.96, 1.0)},
        ),
        Protocol(
            "flickr30k-karpathy-1k",
            "Karpathy's test split of Flickr30k: 1,000 images, five captions each",
            {"train": (29_000, 145_000), "dev": (1_014, 5_070), "test": (1_000, 5_000)},
            _in_splits(
                "dataset_flickr30k.json",
                "flickr_annotations_30k.csv",
                "flickr30k_{}_karpathy.txt",
                "flickr30k_{}.json",
            ),
        ),
        Protocol(
            "flickr30k-full-31k",
            "all of Flickr30k as one pool: 31,783 images, 158,915 captions",
            {"test": (31_783, 158_915)},
            {"test": ("results_20130124.token", "results.csv", "captions.txt")},
            is_whole=True,
        ),
        Protocol(
            "flickr8k-1k",
            "Flickr8k's own split: 6,000 / 1,000 / 1,000 images, five captions each; 91 images are in no split",
            {"train": (6_000, 30_000), "dev": (1_000, 5_000), "test": (1_000, 5_000)},
            _in_splits("Flickr8k.token.txt", "dataset_flickr8k.json", "captions.txt"),
        ),
        Protocol(
            "custom",
            "whatever was given, by its own size",
            {},
            dict.fromkeys(("train", "dev", "test", "all"), ("*",)),
            hashed_splits={"train": (0.0, 0.8), "dev": (0.8, 0.9), "test": (0.9, 1.0)},
        ),
    )
}


def protocol_of(name: str, split: str) -> Protocol:
    """The protocol called ``name``, if it has such a split.

    >>> protocol_of("flickr8k-1k", "test").sizes["test"]
    (1000, 5000)
    """
    if name not in PROTOCOLS:
        raise UserError(f"there is no protocol {name!r}: use one of {', '.join(PROTOCOLS)}")
    protocol = PROTOCOLS[name]
    if split not in protocol.files:
        raise UserError(f"{name} has no split {split!r}: it has {', '.join(protocol.files)}")
    return protocol
