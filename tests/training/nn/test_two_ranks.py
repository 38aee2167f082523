"""DDP of every router, in one pair of gloo processes: starting them is what takes the time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.routers import IDS


@pytest.fixture(scope="module")
def output():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = Path(__file__).with_name("two_ranks.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(script.parents[2]), *sys.path])}
    run = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=280, env=environment)
    return run.stdout + run.stderr


@pytest.mark.parametrize("case", IDS)
def test_two_processes_agree_with_one(case, output):
    assert f"passed {case}\n" in output, output[-3000:]
