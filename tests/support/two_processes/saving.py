"""What saving adds to the memory of a process, as a share of what it keeps: torchrun saving.py FOLDER [background].

Linux only: the peak is the kernel's.
"""

import os
import sys
from pathlib import Path

import torch

from ermoe.nn.sharding import own_experts
from ermoe.train.compute import processes
from ermoe.train.trainer import Trainer
from support.tiny_run import recipe, run

WIDE = {"embed_dim": 384, "num_heads": 6}
SPARSITY = {"num_experts": 8, "rank": 384, "route_rank": 8}


def resident(field):
    """VmRSS, or VmHWM, its peak since `forget_peak`; in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(field))


def forget_peak():
    Path("/proc/self/clear_refs").write_text("5")


class Measuring(Trainer):
    """Says after every save what share of its tensors' bytes was needed besides."""

    def save(self, run, where):
        kept = sum(own_experts(tensor.detach()).nbytes for tensor in self._tensors().values())
        forget_peak()
        before = resident("VmRSS")
        super().save(run, where)
        self.finish_saving()
        share = (resident("VmHWM") - before) / kept
        os.write(sys.stdout.fileno(), f"{share:.3f}\n".encode())  # in one piece: the other process writes too


if __name__ == "__main__":
    torch.set_num_threads(1)
    with processes("cpu") as own_group:
        import ermoe.train.loop

        ermoe.train.loop.Trainer = Measuring
        chosen = recipe(SPARSITY, model_args=WIDE, epochs=1, save_every=4, retract_every=0)
        how = "fsdp+ep" if "fsdp+ep" in sys.argv else "ep"
        background = "background" in sys.argv
        run(Path(sys.argv[1]), chosen, group=own_group, parallel=how, background_saves=background)
