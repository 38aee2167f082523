"""Memory that one pass has freed is taken by the next, in a process of its own, for it cannot be undone."""

import os
import subprocess
import sys

import pytest

from ermoe import cpu

_PROGRAM = """
import resource
from ermoe.cpu import keep_freed
kept = keep_freed() if {keeps} else None
import numpy as np

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        pieces = [np.ones(3 * 2**20 // 8) for _ in range(20)]
        del pieces
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

for _ in range(2):
    faults()
print(kept, faults())
"""


def run(keeps=True, **environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM.format(keeps=keeps)],
        capture_output=True,
        text=True,
        check=True,
        env=inherited | environment,
    )
    kept, faults = done.stdout.split()
    return kept, int(faults)


@pytest.mark.skipif(not cpu._is_glibc(), reason="another C library than glibc")
def test_freed_memory_stays():
    kept, faults = run()
    assert kept == "True"
    assert faults < 8_000, "100 pieces of 3 MB are 76,800 pages"
    if run(keeps=False)[1] < 25_000:
        pytest.skip("here the C library keeps what is freed by itself")


@pytest.mark.skipif(not cpu._is_glibc(), reason="another C library than glibc")
def test_what_users_set_stays():
    kept, _ = run(MALLOC_TRIM_THRESHOLD_="131072")
    assert kept == "False"


def test_other_c_libraries_are_left_alone(monkeypatch):
    def unknown(name):
        raise ValueError(name)

    monkeypatch.setattr(os, "confstr", unknown, raising=False)
    assert not cpu.keep_freed()
