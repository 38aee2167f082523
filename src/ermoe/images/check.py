"""`check`: read everything once and say what is wrong, before a long run finds out."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from rich.console import Console
from rich.progress import track

from ermoe.data.images import Images
from ermoe.errors import UserError

_EXAMPLES = 10
_PORTION = 1000  # images that threads are given at once
_Outcome = tuple[str, bytes] | UserError
_Seen = dict[bytes, tuple[Images, int]]  # digest of the pixels -> where they were first


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
        """Everything for a person to read; of the classes the smallest and the largest, of the rest the first cases."""
        lines = list(self.found.values())
        for split, counts in self.class_counts.items():
            few, many = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
            lines.append(f"{split}: from {counts[few]:,} images ({few}) to {counts[many]:,} ({many}) a class")
        lines.append("sizes: " + _some(f"{size} ({number})" for size, number in self.sizes.items()))
        lines += _cases(f"{len(self.unreadable)} unreadable", self.unreadable)
        lines += _cases(f"{len(self.leaked)} in both splits", [f"{a} = {b}" for a, b in self.leaked])
        lines += _cases(f"{len(self.repeated)} repeated within a split", [f"{a} = {b}" for a, b in self.repeated])
        return "\n".join(lines)


def check(splits: Sequence[Images], *, threads: int = 4) -> Findings:
    """Reads every image of the splits given, usually train and test, and compares their pixels.

    On a terminal a bar on the standard error shows how far it is.

    >>> from ermoe.data.images import open_images
    >>> findings = check([open_images("digits", "train"), open_images("digits", "test")])
    >>> findings.is_clean, findings.class_counts["test"]["0"]
    (True, 59)
    """
    findings = Findings()
    seen: _Seen = {}
    console = Console(stderr=True)
    for images in splits:
        findings.found[images.split] = images.summary
        findings.class_counts[images.split] = images.class_counts()
        outcomes = track(
            _read_all(images, threads), f"checking {images.split}", len(images), console=console, transient=True,
            disable=not console.is_terminal,
        )  # fmt: skip
        for index, outcome in enumerate(outcomes):
            _take(findings, seen, images, index, outcome)
    return findings


def _read_all(images: Images, threads: int) -> Iterator[_Outcome]:
    """In order, a portion at a time: a million waiting tasks would fill the memory."""
    with ThreadPoolExecutor(threads) as pool:
        for start in range(0, len(images), _PORTION):
            yield from pool.map(lambda index: _read(images, index), range(len(images))[start : start + _PORTION])


def _read(images: Images, index: int) -> _Outcome:
    """(size, digest of the pixels), or why it cannot be read."""
    try:
        image_CHW = images.read(index)
    except UserError as problem:
        return problem
    size = f"{image_CHW.shape[2]} × {image_CHW.shape[1]}"
    return size, hashlib.blake2b(image_CHW.contiguous().numpy().tobytes() + size.encode(), digest_size=16).digest()


def _take(findings: Findings, seen: _Seen, images: Images, index: int, outcome: _Outcome) -> None:
    if isinstance(outcome, UserError):
        findings.unreadable.append(str(outcome))
        return
    size, digest = outcome
    findings.sizes[size] = findings.sizes.get(size, 0) + 1
    first, place = seen.setdefault(digest, (images, index))
    if (first, place) != (images, index):
        pairs = findings.repeated if first is images else findings.leaked
        pairs.append((first.name(place), images.name(index)))


def _cases(title: str, cases: list[str]) -> list[str]:
    rest = len(cases) - _EXAMPLES
    return [title, *(f"  {case}" for case in cases[:_EXAMPLES]), *([f"  … and {rest} more"] if rest > 0 else [])]


def _some(items: Iterable[str]) -> str:
    listed = list(items)
    return ", ".join(listed[:_EXAMPLES]) + (f" and {len(listed) - _EXAMPLES} more" if len(listed) > _EXAMPLES else "")
