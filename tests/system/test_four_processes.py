"""Four processes do what one does, however they share the experts; runs move between ways of sharing and survive."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ermoe.studies.bench import scale
from ermoe.train import checkpoint, parts
from support.children import environment
from support.tiny_run import run
from support.two_processes.experts import CASES
from support.two_processes.runs import assert_same_run, saved_often

EPOCHS = 20
SCRIPTS = Path(__file__).parents[1] / "support" / "two_processes"


def torchrun(num_processes, script, *arguments):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return [*launch, str(SCRIPTS / script), *map(str, arguments)]


def launched(*arguments):
    ended = subprocess.run(torchrun(*arguments), capture_output=True, text=True, timeout=1800, env=environment())
    assert ended.returncode == 0, ended.stderr[-4000:]
    return ended.stdout


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("layout", ["ep:4", "replicate:2,ep:2", "efsdp:2,ep:2"])
def test_experts_on_four_processes_follow_one_process_for_fifty_steps(layout):
    checks = ["used", "exported", *CASES]
    assert launched(4, "experts.py", layout, "50", *checks).splitlines() == [f"{check} held" for check in checks]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A run of one process that nothing disturbs."""
    folder = tmp_path_factory.mktemp("one")
    run(folder, saved_often())
    return folder


@pytest.mark.timeout(600)
def test_a_run_moves_between_numbers_of_processes_and_ways_of_sharing(one, tmp_path):
    for num_processes, how, until in ((4, "ep", 8), (2, "fsdp", 14), (1, "ddp", 18), (4, "fsdp+ep", 99)):
        launched(num_processes, "runs.py", tmp_path, how, until)
    assert_same_run(tmp_path, one)


@pytest.mark.timeout(600)
def test_where_nothing_changes_an_interrupted_run_ends_bit_identical(tmp_path):
    launched(2, "runs.py", tmp_path / "undisturbed", "fsdp+ep", 99)
    for until in (8, 99):
        launched(2, "runs.py", tmp_path / "interrupted", "fsdp+ep", until)
    found, expected = (
        load_file(tmp_path / name / "model/model.safetensors") for name in ("interrupted", "undisturbed")
    )
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("how", ["ep", "fsdp+ep"])
def test_a_run_whose_processes_are_killed_ten_times_ends_as_if_nothing_had_happened(how, tmp_path):
    """Within a second of its first words: it trains, judges, and writes checkpoints and models by then."""
    folder, generator = tmp_path / "killed", random.Random(0)
    for number in range(10):
        launcher = subprocess.Popen(
            torchrun(2, "runs.py", folder, how, EPOCHS, "long"), env=environment(), stderr=subprocess.DEVNULL
        )
        said = changed(folder / "timing.jsonl")
        while changed(folder / "timing.jsonl") == said:
            assert launcher.poll() is None, f"it was over before death {number}"
            time.sleep(0.01)
        time.sleep(generator.uniform(0, 1))
        workers = Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split()
        os.kill(int(generator.choice(workers)), signal.SIGKILL)
        assert launcher.wait(timeout=120) != 0
        if (last := folder / "checkpoints" / "last.pt").exists():
            named = last.parent / checkpoint.read(last)["parts"]
            assert "model.cls_token" in parts.stored_names(named)
    launched(2, "runs.py", folder, how, EPOCHS, "long")
    run(tmp_path / "one", saved_often(EPOCHS))
    assert_same_run(folder, tmp_path / "one")


def changed(path):
    return path.stat().st_mtime_ns if path.exists() else None


@pytest.mark.timeout(600)
@pytest.mark.parametrize("how", ["ep", "fsdp+ep"])
@pytest.mark.parametrize(("background", "most"), [((), 0.2), (("background",), 1.05)], ids=["waiting", "meanwhile"])
def test_a_save_takes_no_memory_or_in_the_background_one_copy_of_what_a_process_keeps(how, background, most, tmp_path):
    shares = list(map(float, launched(2, "saving.py", tmp_path, how, *background).split()))
    assert len(shares) == 2 * 3
    assert max(shares) <= most


@pytest.mark.timeout(1200)
def test_processes_hold_and_send_what_the_formulas_say():
    bars = scale.run(images=1, rounds=1).bars
    promises = [bar for bar in bars if "step" not in bar.name]  # no times
    assert len(promises) == 6
    assert [bar for bar in promises if not bar.holds] == []
