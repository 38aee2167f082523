"""Settings of all tests."""

import os

from ermoe import cpu

_LIMITED = cpu.limit()  # before torch is imported; what pytest starts inherits it, and has nothing to say

import pytest  # noqa: E402
import torch  # noqa: E402

pytest_plugins = ["support.fixtures"]

# The models are tiny: threads that wait for each other cost more than they save, above all on a busy machine.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_sessionstart(session):
    """A line of its own rather than one of the header, which -q leaves out."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if _LIMITED and reporter:
        reporter.write_line(f"ermoe: {_LIMITED}")


def pytest_collection_modifyitems(items):
    """Lines are counted in the first case of a parametrised test only: the others take half as long for it."""
    seen = set()
    for item in items:
        if hasattr(item, "callspec"):
            test = item.nodeid.partition("[")[0]
            if test in seen:
                item.add_marker(pytest.mark.no_cover)
            seen.add(test)
