"""Random numbers that are looked up instead of drawn: a pure function of (seed, epoch, image, …).

A generator has a history, so what it yields depends on who asked before. A hash has none: an image is augmented the
same way whichever process, worker or restart meets it. The hash is SplitMix64's finaliser, chained over the keys.

Letters: B images.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def hashed(*keys: int | NDArray[np.integer]) -> NDArray[np.uint64]:
    """64 well-mixed bits for every combination of keys, which broadcast against each other.

    >>> len(set(hashed(0, np.arange(1000)).tolist()))
    1000
    """
    state = np.zeros(1, np.uint64)
    for key in keys:
        state = _mixed(state ^ _mixed(np.atleast_1d(np.asarray(key)).astype(np.uint64)))
    return state


def uniform(num: int, *keys: int | NDArray[np.integer]) -> NDArray[np.float64]:
    """``num`` numbers in [0, 1) for every combination of keys, (B, num).

    >>> alone, together = uniform(3, 0, 7, np.array([5])), uniform(3, 0, 7, np.array([4, 5]))
    >>> bool((alone[0] == together[1]).all())
    True
    """
    bits = hashed(*(np.expand_dims(np.atleast_1d(np.asarray(key)), -1) for key in keys), np.arange(num))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mixed(bits: NDArray[np.uint64]) -> NDArray[np.uint64]:
    bits = bits + _GOLDEN
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))
