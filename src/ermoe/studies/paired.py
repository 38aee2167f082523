"""Two models judged by the same images: which ones each names rightly, and what their difference is worth.

Letters: S seeds, N images.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ermoe.studies.figures import Runs

Right = NDArray[np.bool_]
RIGHT = "right"
"""The figure that holds which images are named rightly."""
Judged = tuple[str, ...]
"""The name of a run, and the path to the figures among which that one is."""


def packed(right_N: Right) -> str:
    """Eight images a byte, in hexadecimal digits.

    >>> packed(np.array([True, False, False, False, True, True]))
    '8c'
    """
    return np.packbits(right_N).tobytes().hex()


def unpacked(digits: str) -> Right:
    """What was packed, and wrong answers up to a multiple of eight.

    >>> unpacked("8c").astype(int).tolist()
    [1, 0, 0, 0, 1, 1, 0, 0]
    """
    return np.unpackbits(np.frombuffer(bytes.fromhex(digits), dtype=np.uint8)).astype(bool)


@dataclass(frozen=True, slots=True)
class Difference:
    """Of two accuracies: its mean, and half of its 95 % interval over seeds and images, or over images alone."""

    mean: float
    half_width: float
    num_seeds: int

    @property
    def is_noise(self) -> bool:
        """Whether zero is in the interval."""
        return abs(self.mean) <= self.half_width

    def __str__(self) -> str:
        return f"{100 * self.mean:+.1f} ± {100 * self.half_width:.1f}"


def difference(ours: Sequence[Right], theirs: Sequence[Right], num_images: int | None = None) -> Difference:
    """Ours minus theirs, a pair of runs for each seed, all judged by the same images.

    Other seeds and other images would both have given another difference, so the variances of the two means are added:
    that over seeds of what all images say, Var_S / S, and that over images of what all seeds say, Var_N / N. The
    degrees of freedom are Satterthwaite's, so three seeds that disagree make for a wide interval.

    >>> rng = np.random.default_rng(0)
    >>> better, worse = ([rng.random(4000) < chance for _ in range(3)] for chance in (0.62, 0.58))
    >>> found = difference(better, worse)
    >>> bool(abs(found.mean - 0.04) < found.half_width), found.is_noise
    (True, False)
    """
    from scipy.special import stdtrit

    pairs = [our.astype(float) - their for our, their in zip(ours, theirs, strict=False)]
    apart_SN = np.stack(pairs)
    num_seeds = len(apart_SN)
    num_images = num_images or apart_SN.shape[1]
    mean_S, mean_N = apart_SN.sum(1) / num_images, apart_SN.mean(0)[:num_images]
    of_images = mean_N.var(ddof=1) / num_images
    of_seeds = mean_S.var(ddof=1) / num_seeds if num_seeds > 1 else 0.0
    total = of_images + of_seeds
    if total == 0:
        return Difference(float(mean_S.mean()), 0.0, num_seeds)
    freedom = total**2 / (of_images**2 / (num_images - 1) + of_seeds**2 / max(num_seeds - 1, 1))
    return Difference(float(mean_S.mean()), float(stdtrit(freedom, 0.975) * total**0.5), num_seeds)


def apart(runs: Runs, ours: Judged, theirs: Judged) -> Difference | None:
    """The difference of two runs, seed by seed; None where there is nothing to compare."""
    first, second = _by_seed(runs, ours), _by_seed(runs, theirs)
    common = sorted(first.keys() & second.keys())
    if not common or ours == theirs:
        return None
    num_images = next((int(number) for number in runs.of(*ours, "num_images")), None)
    return difference(
        [unpacked(first[seed]) for seed in common], [unpacked(second[seed]) for seed in common], num_images
    )


def _by_seed(runs: Runs, judged: Judged) -> dict[int, str]:
    found = [(record["seed"], Runs([record]).of(*judged, RIGHT)) for record in runs.records]
    return {seed: str(digits[0]) for seed, digits in found if digits}


def paired_verdict(runs: Runs, ours: tuple[Judged, str], theirs: tuple[Judged, str], what: str = "accuracy") -> str:
    """A sentence on two runs, each with what the sentence calls it; noise is called equal."""
    (one, larger), (other, smaller) = ours, theirs
    found = apart(runs, one, other)
    if found is None:
        return f"{what}: nothing to compare."
    over = "images, one seed" if found.num_seeds == 1 else f"{found.num_seeds} seeds and all images"
    size = f"{100 * abs(found.mean):.1f} points (95 % interval over {over}: ± {100 * found.half_width:.1f})"
    if found.is_noise:
        return f"{what}: {larger} and {smaller} are equal within the noise: {size}."
    first, second = (larger, smaller) if found.mean > 0 else (smaller, larger)
    return f"{what}: {first} is above {second} by {size}."
