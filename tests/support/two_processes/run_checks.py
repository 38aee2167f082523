"""Every check of two processes, one after the other, in a single launch: starting processes takes most of the time.

    torchrun --nproc-per-node=2 --max-restarts=3 run_checks.py FOLDER

Leaves FOLDER/CHECK.json for each check: {"problem": null}, or the traceback of the process that failed first. After a
failure torchrun starts both processes again; checks that have a file by then are over. The training runs come last,
because one of them ends a process on purpose; they leave their run folders, and whoever is started again goes on there.
"""

import json
import sys
import traceback
from functools import partial
from importlib import import_module
from pathlib import Path

import torch
import torch.distributed as dist

from ermoe.files import replacing
from ermoe.train.compute import processes
from support.routers import CASES, IDS
from support.two_processes import experts, folders, layers, recording, routers, runs

LAYERS = [
    layers.ddp,
    layers.ddp_with_an_idle_rank,
    layers.ddp_accumulation,
    layers.fsdp,
    layers.fsdp_in_part,
    layers.balance_over_uneven_batches,
]


def contrastive_gradients(group):
    """Imported when it is its turn: retrieval brings transformers along, which the second start does without."""
    import_module("support.two_processes.contrastive").gradients(group)


def recognition_of_regions(group):
    """Imported likewise."""
    import_module("support.two_processes.regions").recognition(group)


CHECKS = {
    **{f"layers-{check.__name__}": check for check in LAYERS},
    **{f"routers-{case}": partial(routers.check, *given) for case, given in zip(IDS, CASES, strict=True)},
    **{f"recording-{check.__name__}": check for check in (recording.ddp, recording.fsdp)},
    **{f"experts-{case}": partial(experts.check, case, ("ep",), (2,)) for case in experts.QUICK},
    "experts-copied": partial(experts.check, "collapsed", ("replicate", "ep"), (2, 1)),  # one of them merges, one not
    "experts-sharded": partial(experts.check, "soft", ("efsdp", "ep"), (1, 2)),
    **{f"used-{how}": partial(experts.used, how, among) for how, among in (("ep", 2), ("fsdp", 0), ("fsdp+ep", 1))},
    "exported": partial(experts.exported, "fsdp+ep", 1),
    "contrastive-gradients": contrastive_gradients,
    "recognition-of-regions": recognition_of_regions,
    "folders-not-shared": folders.not_shared,
    "folders-other-data": folders.other_data,
}
RUNS = [runs.fsdp, runs.sharded_experts_interrupted, runs.experts_and_accumulation, runs.ddp_with_a_death]


def note(path, problem):
    if not path.exists():
        with replacing(path) as draft:
            draft.write_text(json.dumps({"problem": problem}))


def run_check(path, check, group):
    try:
        check(group)
        dist.barrier()
    except Exception:
        note(path, traceback.format_exc())
        raise
    if group.is_main:
        note(path, None)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    with processes("cpu") as group:
        over = {path.stem for path in folder.glob("*.json")}
        dist.barrier()  # both have looked before one of them writes
        for name, check in CHECKS.items():
            if name not in over:
                run_check(folder / f"{name}.json", check, group)
        for run in RUNS:
            run(group, folder)
