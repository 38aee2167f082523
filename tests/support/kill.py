"""Kills a run at random moments, NUMBER times, and then lets it end: NUMBER FOLDER, started by test_resuming.py.

Everything is imported once here; each life of the run is a fork, so that a life costs no start-up.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from ermoe.train import checkpoint
from support.tiny_run import AUGMENTED, recipe, run

CHOSEN = recipe(augmentation=AUGMENTED, save_every=3, validation=0.04, model_args={"drop_rate": 0.1})


def live(folder):
    """One life of the run, in a process of its own."""
    child = os.fork()
    if child:
        return child
    torch.set_num_threads(1)
    run(folder, CHOSEN)
    os._exit(0)


def undisturbed(folder):
    _, status = os.waitpid(live(folder), 0)
    assert status == 0


def lines(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def disturbed(folder, kills):
    """Lives that are cut short, each a little after it has come further than the one before; the last ends."""
    moments = random.Random(0)
    for reached in sorted(moments.sample(range(16), kills)):
        child = live(folder)
        while lines(folder) < reached:
            time.sleep(0.002)
        time.sleep(moments.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status == signal.SIGKILL, status
        if (folder / "checkpoints" / "last.pt").exists():
            checkpoint.read(folder / "checkpoints" / "last.pt")  # never half-written
    undisturbed(folder)


if __name__ == "__main__":
    kills, place = int(sys.argv[1]), Path(sys.argv[2])
    undisturbed(place / "undisturbed")
    disturbed(place / "disturbed", kills)
