"""The official BIDS validator, where it is installed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

_BESIDE_PYTHON = str(Path(sys.executable).parent)


def bids_errors(folder):
    """What the validator calls errors in a folder, warnings left out; skips the test without a validator."""
    validator = shutil.which("bids-validator-deno", path=_BESIDE_PYTHON) or shutil.which("bids-validator-deno")
    if validator is None:
        pytest.skip("bids-validator-deno is not installed")
    run = subprocess.run([validator, "--json", str(folder)], capture_output=True, text=True, timeout=120)
    issues = json.loads(run.stdout)["issues"]["issues"]
    return [issue for issue in issues if issue["severity"] == "error"]
