"""Processes that tests start."""

import os
from pathlib import Path

TESTS = Path(__file__).parents[1]


def environment(**more):
    """That of this process, in which a child finds ``support`` too and keeps to one thread."""
    places = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1", **more}
