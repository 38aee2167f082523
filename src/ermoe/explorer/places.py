"""What kind of model lies at a place, and what to call it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ermoe.files import StrPath


def is_index(path: StrPath) -> bool:
    """Whether `ermoe retrieve index` wrote it."""
    return (Path(path) / "index.json").is_file()


def is_brain_age(path: StrPath) -> bool:
    """Whether `ermoe brain train` wrote it, or it is the model in such a run."""
    return any((Path(path) / folder / "brain_age.json").is_file() for folder in ("", "model"))


def model_names(models: Sequence[str]) -> list[str]:
    """The last part of each path that is its own; the whole path where two models share it.

    >>> model_names(["runs/a", "runs/b/model", "hub/c"])
    ['a', 'b', 'c']
    """
    ends = [Path(place).name for place in models]
    ends = [Path(p).parent.name if end in ("model", "best") else end for p, end in zip(models, ends, strict=True)]
    is_own = [end not in ("", "..") and ends.count(end) == 1 for end in ends]
    return [end if own else place for place, end, own in zip(models, ends, is_own, strict=True)]
