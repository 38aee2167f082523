"""`ermoe bench start`: one prediction as it is asked for in a shell, beyond the libraries it cannot do without."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from PIL import Image
from rich.console import Console

from ermoe.images.presets import recipe
from ermoe.models.io import save
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.result import Bar, Result

_SECONDS = 2.0  # beyond the libraries


def run(*, rounds: int, threads: int) -> Result:
    """A picture by a small sparse ViT, and a prepared scan by a tiny brain-age model, each in a process of its own."""
    result = Result("start", {"rounds": rounds, "threads": threads}, reference="the libraries alone")
    with TemporaryDirectory() as place:
        folder = Path(place)
        _time(result, "image predict", _image(folder), "import torch, timm", rounds, threads)
        if importlib.util.find_spec("nibabel") is not None:  # of the extra "brain"
            _time(result, "brain predict", _scan(folder), "import torch", rounds, threads)
    return result


def _time(result: Result, command: str, given: list[str], libraries: str, rounds: int, threads: int) -> None:
    """A table of one command beside its libraries, and its bar: the median of what comes on top in a round."""
    ours = [sys.executable, "-m", "ermoe", *command.split(), *given, "--threads", str(threads)]
    work = {libraries: _process([sys.executable, "-c", libraries]), f"ermoe {command}": _process(ours)}
    seconds = take_turns(work, rounds=rounds, warmup=1)
    result.tables[f"one file, {command}"] = compare(seconds, libraries)
    beyond = float(np.median(np.subtract(seconds[f"ermoe {command}"], seconds[libraries])))
    result.bars.append(Bar(f"seconds of `ermoe {command}` beyond `{libraries}`", beyond, _SECONDS))


def _process(command: list[str]) -> Callable[[], object]:
    return partial(subprocess.run, command, check=True, capture_output=True)


def _image(folder: Path) -> list[str]:
    save(recipe("cifar-ermoe").build(num_classes=10), folder / "image-model")
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "picture.png")
    return [str(folder / "image-model"), str(folder / "picture.png")]


def _scan(folder: Path) -> list[str]:
    """The first round, which does not count, prepares the scan."""
    from ermoe.brain.data.cohort import open_cohort
    from ermoe.brain.data.phantom import synthesize
    from ermoe.brain.run import train

    cohort, cache = synthesize(folder / "phantoms", 12, spacing_mm=6.0), folder / "cache"
    train(cohort, folder / "brain", preset="tiny", folds=3, cache=cache, console=Console(quiet=True))
    return [str(folder / "brain"), str(open_cohort(cohort).scans[0].t1), "--cache", str(cache)]
