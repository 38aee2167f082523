"""Which images and captions a retrieval figure is about. Protocols have names and sizes, and are never mixed.

Figures of two protocols cannot be compared: the same model finds 82 % of captions among 1,000 images of Flickr30k and
far fewer among 31,783. Sizes are checked whenever data are opened.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources

from ermoe.errors import UserError
from ermoe.files import from_json


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

    def check(self, split: str, num_images: int, num_captions: int, where: str) -> None:
        """Raises unless a split has the protocol's size."""
        expected = self.sizes.get(split)
        if expected is not None and expected != (num_images, num_captions):
            raise UserError(
                f"{where} has {num_images:,} images with {num_captions:,} captions for the split {split!r}, and "
                f"{self.name} is {expected[0]:,} with {expected[1]:,}: use the file this protocol is made of, or "
                "--protocol custom, whose figures go by their own size"
            )


def _read() -> dict[str, Protocol]:
    """The protocols of the table that is shipped."""
    table = resources.files("ermoe.retrieval.captions") / "protocols.toml"
    stored = tomllib.loads(table.read_text("utf-8"))
    return {name: from_json(Protocol, {"name": name, **own}, where=str(table)) for name, own in stored.items()}


PROTOCOLS = _read()


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
