"""Runs of two processes, started by torchrun in test_processes.py: MODE FOLDER."""

import os
import signal
import sys
from pathlib import Path

import torch

from ermoe.train.compute import processes
from support.tiny_run import StoppedError, recipe, run


def ddp_with_a_death(folder, group):
    """In its first life rank 1 dies in the middle of the second epoch; torchrun starts both again."""
    died = Path(folder, "died")

    def die(epoch, step):
        if group.rank == 1 and (epoch, step) == (1, 7) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    run(Path(folder, "ddp"), recipe(precision="fp64", save_every=5), group=group, before=die)


def fsdp(folder, group):
    run(Path(folder, "fsdp"), recipe(precision="fp64", save_every=5), group=group, parallel="fsdp")


def fsdp_interrupted(folder, group):
    """Stops at step 13 of the first epoch, after the checkpoint of step 10."""

    def stop(epoch, step):
        if step == 13:
            raise StoppedError

    try:
        run(Path(folder, "moved"), recipe(precision="fp64", save_every=5), group=group, parallel="fsdp", before=stop)
    except StoppedError:
        return


def accumulation(folder, group):
    run(Path(folder, "parts"), recipe(precision="fp64", save_every=5, accumulate=2), group=group)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with processes("cpu") as group:
        for mode in sys.argv[2:]:
            globals()[mode](sys.argv[1], group)
