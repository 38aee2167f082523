"""Training runs of several processes, and how they are compared."""

import os
import signal
import sys
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from ermoe.train.compute import processes
from ermoe.train.run_folder import read_lines
from support.tiny_run import StoppedError, images, labelled, recipe, run

TOLERANCE = 1e-6


def assert_same_run(found, expected):
    lines, wanted = (read_lines(place / "metrics.jsonl") for place in (found, expected))
    assert [line["step"] for line in lines] == [line["step"] for line in wanted]
    for line, other in zip(lines, wanted, strict=True):
        names = (
            ("loss", "lr", "gradient_norm")
            if line["kind"] == "train"
            else ("loss", "top1", "load_cv2", "weight_cv2", "drift", "penalty")
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


def short_run(folder, *, accumulate=1, **options):
    """Twelve steps with everything that can happen in a run: saved after three, retracted after three."""
    chosen = recipe(precision="fp64", save_every=3, retract_every=3, accumulate=accumulate)
    return run(folder, chosen, data=labelled(images("train", 96)), **options)


def ddp_with_a_death(group, folder):
    """In its first life rank 1 dies in the middle of the second epoch; torchrun starts both again."""
    died = Path(folder, "died")

    def die(epoch, step):
        if group.rank == 1 and (epoch, step) == (1, 4) and not died.exists():
            died.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    short_run(Path(folder, "ddp"), group=group, before=die)


def fsdp(group, folder):
    short_run(Path(folder, "fsdp"), group=group, parallel="fsdp")


def sharded_experts_interrupted(group, folder):
    """Stops at step 5 of the first epoch, after the checkpoint of step 3."""

    def stop(epoch, step):
        if step == 5:
            raise StoppedError

    with suppress(StoppedError):
        short_run(Path(folder, "moved"), group=group, parallel="fsdp+ep", before=stop)


def experts_and_accumulation(group, folder):
    """Checkpoints are written in the background."""
    short_run(Path(folder, "parts"), group=group, parallel="ep", accumulate=2, background_saves=True)


def saved_often(epochs=2):
    """Twelve steps an epoch, of which every fifth is saved."""
    return recipe(precision="fp64", save_every=5, epochs=epochs)


def run_until(group, folder, how, last_step):
    """A run that goes on where it stands, and stops before a step."""

    def stop(epoch, step):
        if 12 * epoch + step == last_step:
            raise StoppedError

    with suppress(StoppedError):
        run(Path(folder), saved_often(), group=group, parallel=how, before=stop)


def long_run(group, folder, how, epochs):
    """Goes on where it stands, saves in the background, and leaves time to be killed in."""
    run(Path(folder), saved_often(epochs), group=group, parallel=how, background_saves=True)


if __name__ == "__main__":  # torchrun runs.py FOLDER PARALLEL LAST-STEP, or EPOCHS long
    torch.set_num_threads(1)
    place, way, number = sys.argv[1], sys.argv[2], int(sys.argv[3])
    with processes("cpu") as own_group:
        (long_run if "long" in sys.argv else run_until)(own_group, place, way, number)
