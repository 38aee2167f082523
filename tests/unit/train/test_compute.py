"""Who takes part in a run, read from what starts it."""

import re
from pathlib import Path

from ermoe.images.presets import recipe as recipe_called
from ermoe.train.compute import _from_slurm

DOCS = Path(__file__).parents[3] / "docs"


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
    text = (DOCS / "how-to/several-processes.md").read_text(encoding="utf-8").replace("\\\n", " ")
    commands = [line for line in text.splitlines() if line.startswith(("torchrun ", "srun "))]
    assert len(commands) == 2
    for command in commands:
        preset = recipe_called(re.search(r"image train (\S+)", command)[1])
        num_processes = int(re.search(r"--(?:nproc-per-node|ntasks)=(\d+)", command)[1])
        batch = re.search(r"--batch-size (\d+)", command)
        assert (int(batch[1]) if batch else preset.training.batch_size) % num_processes == 0, command
        assert preset.init != "dense" or "--weights " in command
