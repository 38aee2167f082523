"""Two processes do what one does, survive a death among them, and hand over to another number of processes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ermoe.images.presets import recipe as recipe_called
from ermoe.train.compute import _from_slurm
from ermoe.train.run_folder import read_lines
from support.tiny_run import recipe, run

TOLERANCE = 1e-6
TESTS = Path(__file__).parents[2]


def torchrun(folder, *modes, restarts=0):
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    launch += [f"--max-restarts={restarts}", "--monitor-interval=0.2"]
    script = str(Path(__file__).with_name("two_processes.py"))
    environment = {**os.environ, "PYTHONPATH": f"{TESTS}:{TESTS.parent / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, script, str(folder), *modes], capture_output=True, text=True, timeout=280, env=environment
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One process first; then two, in a single launch, because starting them takes most of the time."""
    folder = tmp_path_factory.mktemp("runs")
    torch.set_num_threads(1)
    run(folder / "one", recipe(precision="fp64", save_every=5))
    # The death comes last: whoever is started again finds the runs before it finished.
    torchrun(folder, "fsdp", "fsdp_interrupted", "accumulation", "ddp_with_a_death", restarts=1)
    return folder


def assert_same_run(found, expected):
    lines, wanted = (read_lines(place / "metrics.jsonl") for place in (found, expected))
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        names = (
            ("loss", "lr", "gradient_norm") if line["kind"] == "train" else ("loss", "top1", "load_cv2", "weight_cv2")
        )
        assert ("fluctuation" in line) == ("fluctuation" in other)
        for name in (*names, *({"fluctuation"} & line.keys())):
            assert line[name] == pytest.approx(other[name], abs=TOLERANCE), (line["step"], name)
    weights, others = (load_file(place / "model" / "model.safetensors") for place in (found, expected))
    assert weights.keys() == others.keys()
    for name, tensor in others.items():
        torch.testing.assert_close(
            weights[name], tensor, rtol=0, atol=TOLERANCE, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_one_process_trains_for_fifty_steps_with_everything_switched_on(folder):
    lines = read_lines(folder / "one" / "metrics.jsonl")
    assert sum(line["kind"] == "train" for line in lines) == 50
    assert lines[-1]["loss"] < lines[25]["loss"]
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


def test_accumulation_over_two_processes_equals_one_batch(folder):
    assert_same_run(folder / "parts", folder / "one")


def test_a_run_of_two_sharded_processes_goes_on_in_one(folder):
    assert not (folder / "moved" / "model").exists()
    run(folder / "moved", recipe(precision="fp64", save_every=5))
    assert_same_run(folder / "moved", folder / "one")


def test_slurm_variables_become_those_of_torchrun():
    job = {"SLURM_NTASKS": "4", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_JOB_ID": "123456"}
    job |= {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.7"}  # where srun was typed, perhaps a login node
    found = _from_slurm({**job, "SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "gpu[07-09,12]"})
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR")
    assert tuple(found[name] for name in names) == ("3", "4", "1", "gpu07")
    assert 20_000 <= int(found["MASTER_PORT"]) < 40_000
    assert _from_slurm(job) == {}, "a batch script without srun is alone"
    assert _from_slurm({**job, "SLURM_STEP_NUM_TASKS": "1"}) == {}


def test_the_commands_of_the_documentation_can_be_shared_out_and_start_from_weights():
    text = (TESTS.parent / "docs" / "training.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith(("torchrun ", "srun "))]
    assert len(commands) == 2
    for command in commands:
        preset = recipe_called(re.search(r"image train (\S+)", command)[1])
        num_processes = int(re.search(r"--(?:nproc-per-node|ntasks)=(\d+)", command)[1])
        batch = re.search(r"--batch-size (\d+)", command)
        assert (int(batch[1]) if batch else preset.training.batch_size) % num_processes == 0, command
        assert preset.init != "dense" or "--weights " in command
