"""Two processes record what one would have seen. The checks are in recording_processes.py."""

import subprocess
import sys
from pathlib import Path


def test_two_processes_record_as_one():
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = str(Path(__file__).with_name("recording_processes.py"))
    run = subprocess.run([*launch, script], capture_output=True, text=True, timeout=200)
    assert "passed ddp\npassed fsdp\n" in run.stdout, (run.stdout + run.stderr)[-3000:]
