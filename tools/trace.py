"""The way of a batch and of a scan through the code: files in the order in which they are first entered.

    python tools/trace.py [DOCUMENT]

A batch is followed from ``ermoe image train`` to its loss, a scan from ``ermoe brain predict`` to its age. Files of
``ermoe.nn`` are left out: docs/explanation/method.md leads through them; and so are those that stand at the door
(docs/reference/refused.md).
With a document, the lists between its marks
``<!-- trace: batch -->``, ``<!-- trace: scan -->`` and ``<!-- end -->`` are written anew.
"""

from __future__ import annotations

import ast
import contextlib
import io
import re
import sys
import tempfile
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

import ermoe
from ermoe.cli.main import main
from ermoe.options import as_typed

ROOT = Path(ermoe.__file__).parent
MOST_FILES, MOST_REENTRIES = 25, 4
LEFT_OUT = ("nn", "errors.py", "cli/spelling.py", "train/lock.py", "train/shared.py", "models/weights/stored.py")


class ArrivedError(Exception):
    """The end of the way."""


def followed(command: list[str], ends: Callable[[FrameType], bool]) -> list[str]:
    """Files below ``ermoe``, by first call of one of their functions, until the function that ``ends`` returns.

    What is called while a module is imported is no part of the way.
    """
    as_typed.cache_clear()  # a command that ran before would spare this one its options
    entered: dict[str, None] = {}
    importing = 0

    def watch(frame: FrameType, event: str, value: Any) -> None:
        nonlocal importing
        code = frame.f_code
        if code.co_name == "<module>":
            importing += {"call": 1, "return": -1}.get(event, 0)
        if event == "call" and not importing:
            path = Path(code.co_filename)
            if path.is_relative_to(ROOT) and not any(path.is_relative_to(ROOT / other) for other in LEFT_OUT):
                entered.setdefault(path.relative_to(ROOT).as_posix())
        if event == "return" and ends(frame):
            raise ArrivedError

    with contextlib.suppress(ArrivedError), contextlib.redirect_stdout(io.StringIO()):
        sys.setprofile(watch)
        try:
            main(command)
        finally:
            sys.setprofile(None)
    return [name for name in entered if name not in ("__init__.py", "_auto_classes.py", "_moved.py")]


def packages_entered_again(files: list[str]) -> list[str]:
    """Packages that the way comes back to.

    >>> packages_entered_again(["a/x.py", "b/y.py", "a/z.py"])
    ['a']
    """
    visits = [package for package, _ in groupby(name.partition("/")[0] for name in files)]
    return [package for package in dict.fromkeys(visits) if visits.count(package) > 1]


def drawn(files: list[str]) -> str:
    """A numbered list in Markdown, each file with the first sentence it says about itself."""
    lines = [f"{number}. `{name}` {_first_sentence(ROOT / name)}" for number, name in enumerate(files, 1)]
    again = packages_entered_again(files)
    seen = f"{len(files)} files; packages entered a second time: {', '.join(again) or 'none'}."
    return "\n".join([*lines, "", seen])


def _first_sentence(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())


def batch(folder: Path) -> list[str]:
    """From the command to the loss of the first batch."""
    command = ["image", "train", "digits-ermoe", "digits", "--epochs", "1", "--out", str(folder / "run")]
    return followed(command, lambda frame: frame.f_code.co_qualname == "Classification.loss")


def scan(folder: Path) -> list[str]:
    """From the command to the age of one scan, by a model of a few phantoms."""
    data, run = folder / "bids", folder / "brain"
    with contextlib.redirect_stdout(io.StringIO()):
        main(["brain", "synthesize", "--out", str(data), "--subjects", "6", "--spacing-mm", "6"])
        options = ["--folds", "2", "--epochs", "1", "--cache", str(folder / "cache")]
        main(["brain", "train", "tiny-ermoe", str(data), "--out", str(run), *options])
    one = next(data.rglob("*_T1w.nii*"))
    return followed(["brain", "predict", str(run), str(one), "--cache", str(folder / "new")], lambda frame: False)


def write(document: Path) -> bool:
    """Draws both ways, into the document if there is one; whether both are short enough."""
    holds = True
    with tempfile.TemporaryDirectory() as place:
        ways = {"batch": batch(Path(place)), "scan": scan(Path(place))}
    for name, files in ways.items():
        again = packages_entered_again(files)
        print(f"{name}: {len(files)} files, {len(again)} packages entered again ({', '.join(again)})")
        holds &= len(files) <= MOST_FILES and len(again) <= MOST_REENTRIES
        if document.name:
            text = document.read_text(encoding="utf-8")
            mark = re.compile(rf"(<!-- trace: {name} -->\n).*?(<!-- end -->)", re.DOTALL)
            written = drawn(files).replace("\\", r"\\")
            document.write_text(mark.sub(rf"\g<1>{written}\n\g<2>", text), encoding="utf-8")
        else:
            print(drawn(files))
    return holds


if __name__ == "__main__":
    sys.exit(0 if write(Path(*sys.argv[1:2])) else 1)
