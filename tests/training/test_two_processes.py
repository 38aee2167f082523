"""Two processes do what one does, survive a death among them, and hand over to another number of processes.

All of it happens in one launch of torchrun, and the checks themselves are in support/two_processes.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from ermoe.train.run_folder import read_lines
from support.children import environment
from support.two_processes.run_checks import CHECKS
from support.two_processes.runs import assert_same_run, short_run

TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def launch(tmp_path_factory):
    """The folder that all checks of two processes have written to, and how their launch ended."""
    folder = tmp_path_factory.mktemp("two")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    torchrun += ["--max-restarts=3", "--monitor-interval=0.2"]
    script = str(TESTS / "support" / "two_processes" / "run_checks.py")
    ended = subprocess.run(
        [*torchrun, script, str(folder)], capture_output=True, text=True, timeout=280, env=environment()
    )
    return folder, ended


@pytest.mark.parametrize("check", CHECKS)
def test_two_processes_behave_as_one(check, launch):
    folder, ended = launch
    path = folder / f"{check}.json"
    assert path.exists(), ended.stderr[-4000:]
    problem = json.loads(path.read_text())["problem"]
    assert problem is None, problem


@pytest.fixture(scope="module")
def folder(launch):
    """The runs of two processes beside one of a single process."""
    folder, ended = launch
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]
    short_run(folder / "one")
    return folder


def test_one_process_trains_with_everything_switched_on(folder):
    lines = read_lines(folder / "one" / "metrics.jsonl")
    assert sum(line["kind"] == "train" for line in lines) == 12
    assert lines[-1]["loss"] < lines[6]["loss"]
    offsets = [
        t for n, t in load_file(folder / "one" / "model" / "model.safetensors").items() if n.endswith("offset_E")
    ]
    assert offsets
    assert all(offset.any() for offset in offsets)


def test_ddp_equals_one_process_although_a_rank_died_and_was_restarted(folder):
    assert (folder / "died").exists()
    assert_same_run(folder / "ddp", folder / "one")


def test_fsdp_equals_one_process(folder):
    assert_same_run(folder / "fsdp", folder / "one")


def test_experts_on_two_processes_and_accumulation_equal_one_batch_of_one_process(folder):
    assert_same_run(folder / "parts", folder / "one")


def test_a_run_of_two_processes_with_sharded_experts_goes_on_in_one(folder):
    assert not (folder / "moved" / "model").exists()
    assert (folder / "moved" / "checkpoints" / "parts-0-3").exists()
    short_run(folder / "moved")
    assert_same_run(folder / "moved", folder / "one")
    assert [path.name for path in folder.glob("moved/checkpoints/parts-*")] == []
