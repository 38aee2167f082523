"""Training runs of two processes."""

import os
import signal
from pathlib import Path

from support.tiny_run import StoppedError, recipe, run


def ddp_with_a_death(group, folder):
    """In its first life rank 1 dies in the middle of the second epoch; torchrun starts both again."""
    died = Path(folder, "died")

    def die(epoch, step):
        if group.rank == 1 and (epoch, step) == (1, 4) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    run(Path(folder, "ddp"), recipe(precision="fp64", save_every=5), group=group, before=die)


def fsdp(group, folder):
    run(Path(folder, "fsdp"), recipe(precision="fp64", save_every=5), group=group, parallel="fsdp")


def sharded_experts_interrupted(group, folder):
    """Stops at step 8 of the first epoch, after the checkpoint of step 5."""

    def stop(epoch, step):
        if step == 8:
            raise StoppedError

    try:
        chosen = recipe(precision="fp64", save_every=5)
        run(Path(folder, "moved"), chosen, group=group, parallel="fsdp+ep", before=stop)
    except StoppedError:
        return


def experts_and_accumulation(group, folder):
    run(Path(folder, "parts"), recipe(precision="fp64", save_every=5, accumulate=2), group=group, parallel="ep")
