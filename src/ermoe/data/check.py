"""`check`: read everything once and say what is wrong, before a long run finds out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from ermoe.data.images import Images
from ermoe.errors import UserError

_EXAMPLES = 10


@dataclass(slots=True)
class Findings:
    """What `check` saw: by split, what was recognised and how many images each class has; what could not be read, why;
    and pairs of names with equal pixels, within a split and across splits."""

    found: dict[str, str] = field(default_factory=dict)
    class_counts: dict[str, dict[str, int]] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    unreadable: list[str] = field(default_factory=list)
    repeated: list[tuple[str, str]] = field(default_factory=list)
    leaked: list[tuple[str, str]] = field(default_factory=list)

    @property
    def is_clean(self) -> bool:
        """Whether every image could be read and none is in two splits."""
        return not self.unreadable and not self.leaked

    def report(self) -> str:
        """Everything for a person to read, with the first few cases of each kind."""
        lines = list(self.found.values())
        for split, counts in self.class_counts.items():
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            lines.append(f"{split}: from {counts[few]} images ({few}) to {counts[many]} ({many}) a class")
        lines.append("sizes: " + _some(f"{size} ({number})" for size, number in self.sizes.items()))
        lines += _cases(f"{len(self.unreadable)} unreadable", self.unreadable)
        lines += _cases(f"{len(self.leaked)} in both splits", [f"{a} = {b}" for a, b in self.leaked])
        lines += _cases(f"{len(self.repeated)} repeated within a split", [f"{a} = {b}" for a, b in self.repeated])
        return "\n".join(lines)


def check(splits: Sequence[Images], *, threads: int = 4) -> Findings:
    """Reads every image of the splits given, usually train and test, and compares their pixels.

    >>> from ermoe.data.catalogue import open_images
    >>> findings = check([open_images("digits", "train"), open_images("digits", "test")])
    >>> findings.is_clean, findings.class_counts["test"]["0"]
    (True, 59)
    """
    findings = Findings()
    seen: dict[bytes, tuple[str, str]] = {}
    for images in splits:
        findings.found[images.split] = images.found
        findings.class_counts[images.split] = images.class_counts()
        with ThreadPoolExecutor(threads) as pool:
            for index, outcome in enumerate(pool.map(lambda i, images=images: _read(images, i), range(len(images)))):
                _take(findings, seen, images, index, outcome)
    return findings


def _read(images: Images, index: int) -> tuple[str, bytes] | UserError:
    """(size, digest of the pixels), or why it cannot be read."""
    try:
        image_CHW = images.read(index)
    except UserError as problem:
        return problem
    size = f"{image_CHW.shape[2]} × {image_CHW.shape[1]}"
    return size, hashlib.blake2b(image_CHW.contiguous().numpy().tobytes() + size.encode(), digest_size=16).digest()


def _take(
    findings: Findings,
    seen: dict[bytes, tuple[str, str]],
    images: Images,
    index: int,
    outcome: tuple[str, bytes] | UserError,
) -> None:
    if isinstance(outcome, UserError):
        findings.unreadable.append(str(outcome))
        return
    size, digest = outcome
    findings.sizes[size] = findings.sizes.get(size, 0) + 1
    split, name = seen.setdefault(digest, (images.split, images.name(index)))
    if split != images.split:
        findings.leaked.append((name, images.name(index)))
    elif name != images.name(index):
        findings.repeated.append((name, images.name(index)))


def _cases(title: str, cases: list[str]) -> list[str]:
    rest = len(cases) - _EXAMPLES
    return [title, *(f"  {case}" for case in cases[:_EXAMPLES]), *([f"  … and {rest} more"] if rest > 0 else [])]


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    return ", ".join(listed[:_EXAMPLES]) + (f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else "")
