"""Four processes do what one does over fifty steps, however they share the experts, whatever the routing does."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.children import environment
from support.two_processes.experts import CASES

SCRIPT = Path(__file__).parents[1] / "support" / "two_processes" / "experts.py"
LAYOUTS = ["ep:4", "replicate:2,ep:2", "efsdp:2,ep:2"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_experts_on_four_processes_follow_one_process_for_fifty_steps(layout):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    ended = subprocess.run(
        [*torchrun, str(SCRIPT), layout, "50", *CASES], capture_output=True, text=True, timeout=1800, env=environment()
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.split(os.linesep)[: len(CASES)] == [f"{case} held" for case in CASES]
