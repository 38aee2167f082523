"""Settings of all tests."""

import gc
import os

from ermoe import cpu

_LIMITED = cpu.limit()  # before torch is imported; what pytest starts inherits it, and has nothing to say

# The models are tiny: threads that wait for each other cost more than they save, above all on a busy machine. torch
# reads this when a test imports it. It is not imported here: the process that hands out tests does without it.
os.environ["OMP_NUM_THREADS"] = "1"

pytest_plugins = ["support.fixtures"]


def pytest_sessionstart(session):
    """A line of its own rather than one of the header, which -q leaves out."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if _LIMITED and reporter:
        reporter.write_line(f"ermoe: {_LIMITED}")


def pytest_collection_finish(session):
    """Spares the garbage collector the many objects that imports have left, which stay anyway."""
    gc.freeze()


def pytest_sessionfinish(session):
    gc.unfreeze()
