"""Spellings of development versions: each is answered with one sentence that names the one of today."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

from ermoe.errors import UserError

_RENAMED = {
    "brain doctor": "brain check",
    "image eval": "image evaluate",
    "retrieve classify": "retrieve predict",
    "retrieve eval": "retrieve evaluate",
}
_NAME_THE_PRESET = (
    "name preset and data, in this order: ermoe brain train small-ermoe DATA; ermoe brain presets lists them"
)
_OPTIONS = {
    "brain predict": {"--report": "it is --pages now", "--no-report": "it is --no-pages now"},
    "brain train": {"--preset": _NAME_THE_PRESET, "--method": _NAME_THE_PRESET},
    "image study": {"--data": "name the data after the presets: ermoe image study PRESET… DATA"},
    "push": {"--private": "it is --visibility private now", "--no-private": "it is --visibility public now"},
    "retrieve search": {"--html": "it is --report FILE now"},
}
_MOST_WORDS = {
    "brain synthesize": (0, "ermoe brain synthesize --out"),
    "retrieve convert": (2, "ermoe retrieve convert PRESET WEIGHTS --out"),
    "upcycle": (1, "ermoe upcycle MODEL --data"),
}
"""Words before the first option, at most, and how the one beyond is written now."""


def refuse_old_spelling(argv: list[str]) -> None:
    """Raises if a command line is one of an earlier version.

    >>> refuse_old_spelling(["image", "eval", "runs/a", "digits"])
    Traceback (most recent call last):
    ermoe.errors.UserError: ermoe image eval is ermoe image evaluate now
    >>> refuse_old_spelling(["upcycle", "vit", "photos", "--rank", "96"])
    Traceback (most recent call last):
    ermoe.errors.UserError: ermoe upcycle: write ermoe upcycle MODEL --data photos
    """
    name = " ".join(argv[:2])
    if name in _RENAMED:
        raise UserError(f"ermoe {name} is ermoe {_RENAMED[name]} now")
    name = name if name in _OPTIONS or name in _MOST_WORDS else argv[0]
    rest = argv[len(name.split()) :]
    for word in rest:
        if said := _OPTIONS.get(name, {}).get(word.partition("=")[0]):
            raise UserError(f"ermoe {name} {word}: {said}")
    words = list(takewhile(lambda word: not word.startswith("-"), rest))
    most, now = _MOST_WORDS.get(name, (len(words), ""))
    if len(words) > most:
        raise UserError(f"ermoe {name}: write {now} {words[most]}")
    if name == "brain train" and len(words) == 1 and Path(words[0]).exists():
        raise UserError(f"ermoe brain train {words[0]}: {_NAME_THE_PRESET}")
    if name == "bench" and "--threads" in rest:
        numbers = list(takewhile(str.isdecimal, rest[rest.index("--threads") + 1 :]))
        if len(numbers) > 1:
            raise UserError(f"ermoe bench --threads {' '.join(numbers)}: give one number, and run it once for each")
