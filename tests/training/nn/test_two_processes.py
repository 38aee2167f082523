"""Two gloo processes behave as one: DDP, FSDP2, balance. Each check is a function of two_processes.py."""

import subprocess
import sys
from pathlib import Path

import pytest

CHECKS = ["ddp", "ddp_with_an_idle_rank", "ddp_accumulation", "fsdp", "balance_over_uneven_batches"]


@pytest.fixture(scope="module")
def output():
    """All checks in one pair of processes: starting them is what takes the time."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("two_processes.py"))
    run = subprocess.run([*launch, script, *CHECKS], capture_output=True, text=True, timeout=280)
    return run.stdout + run.stderr


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_behave_as_one(check, output):
    assert f"passed {check}\n" in output, output[-3000:]
