"""Kills a run at random moments until it ends by itself: NUMBER FOLDER, started by test_resuming.py.

Everything is imported once here; each life of the run is a fork, so that a life costs no start-up.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
import torch.utils.tensorboard

from ermoe.train import checkpoint
from train.tiny_run import AUGMENTED, recipe, run

CHOSEN = recipe(augmentation=AUGMENTED, save_every=3, model_args={"drop_rate": 0.1})


def live(folder):
    """One life of the run, in a process of its own."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    run(folder, CHOSEN)
    os._exit(0)


def undisturbed(folder):
    start = time.perf_counter()
    _, status = os.waitpid(live(folder), 0)
    assert status == 0
    return time.perf_counter() - start


def disturbed(folder, kills, duration):
    """Lives until enough of them were cut short; the last may end. Together they last about as long as one."""
    moments = random.Random(0)
    killed = 0
    while True:
        child = live(folder)
        if killed < kills:
            time.sleep(moments.uniform(0.3, 1.0) * duration / (kills + 1))
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        killed += status == signal.SIGKILL
        if (folder / "checkpoints" / "last.pt").exists():
            checkpoint.read(folder / "checkpoints" / "last.pt")  # never half-written
        if status == 0:
            return killed
        assert status == signal.SIGKILL, status


if __name__ == "__main__":
    kills, place = int(sys.argv[1]), Path(sys.argv[2])
    seconds = undisturbed(place / "undisturbed")
    print("killed", disturbed(place / "disturbed", kills, seconds))
