"""`ermoe bench training`: a step of training of small models, where all that is not a product counts most."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, cast

import torch
from torch import nn

from ermoe.images.presets import recipe
from ermoe.models.passes import input_shape
from ermoe.models.upcycle import upcycle
from ermoe.nn import retract
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.result import Bar, Result
from ermoe.studies.bench.step import training_step_of
from ermoe.studies.demo_runs import METHODS, demo_recipe

_EQUAL, _RETRACTION = "dense of equal active FLOPs", "ermoe: retraction"


def miniature_of_equal_flops() -> nn.Module:
    """The dense miniature whose feed-forward networks in blocks 1 and 3 are as wide as the two experts of a token."""
    dense = recipe("cifar-dense")
    model: Any = dense.build(num_classes=10)
    wide: Any = replace(dense, model_args={**dense.model_args, "mlp_ratio": 8.0}).build(num_classes=10)
    for block in (1, 3):
        model.blocks[block].mlp = wide.blocks[block].mlp
    return cast(nn.Module, model)


def run(*, rounds: int, threads: int) -> Result:
    """The CIFAR miniatures from nothing, and the demo's models as they go on from a dense one."""
    torch.set_num_threads(threads)
    capability = torch.backends.cpu.get_cpu_capability()
    settings = {"rounds": rounds, "threads": threads, "dtype": "float32", "instructions": capability}
    result = Result("training", settings, reference="first row")
    _time_miniatures(result, rounds)
    _time_the_demo(result, rounds)
    return result


def _time_miniatures(result: Result, rounds: int) -> None:
    torch.manual_seed(0)
    batches = itertools.repeat((torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,))))
    models = {_EQUAL: miniature_of_equal_flops()}
    models |= {
        method: recipe(f"cifar-{method}").build(num_classes=10) for method in ("dense", "ermoe", "v-moe", "gate")
    }
    work = {name: training_step_of(model, batches) for name, model in models.items()}
    work[_RETRACTION] = lambda: retract(models["ermoe"], report=False)
    table = "CIFAR miniature, training step of 100 images"
    result.tables[table] = compare(take_turns(work, rounds=rounds), _EQUAL)
    whole = _with_retraction(result, table, "ermoe", recipe("cifar-ermoe").training.retract_every)
    result.bars += [
        Bar("training step, ERMoE / dense of equal active FLOPs", whole, 1.35),
        Bar("training step, ERMoE / V-MoE", whole / result.ratio(table, "v-moe"), 1.05),
    ]


def _time_the_demo(result: Result, rounds: int) -> None:
    plan = demo_recipe(epochs=1, seed=0)
    models = {}
    for name, options in METHODS.items():
        torch.manual_seed(0)
        dense = plan.build(num_classes=10)
        models[name] = dense if options is None else upcycle(dense, **options, inplace=True)
    images = torch.randn(plan.training.batch_size, *input_shape(models["dense"], None))
    batches = itertools.repeat((images, torch.arange(len(images)) % 10))
    work = {name: training_step_of(model, batches) for name, model in models.items()}
    work[_RETRACTION] = lambda: retract(models["ERMoE"], report=False)
    table = f"demo, training step of {len(images)} digits"
    result.tables[table] = compare(take_turns(work, rounds=rounds), "dense")
    size = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    whole = _with_retraction(result, table, "ERMoE", plan.training.retract_every)
    result.bars += [
        Bar("demo: training step, ERMoE / V-MoE", whole / result.ratio(table, "V-MoE"), 1.0),
        Bar("demo: parameters, ERMoE / V-MoE", size["ERMoE"] / size["V-MoE"], 1.0),
    ]


def _with_retraction(result: Result, table: str, name: str, every: int) -> float:
    """A step over the reference's, with its share of a retraction, which comes every so many steps."""
    step, retraction = result.ratio(table, name), result.ratio(table, _RETRACTION) / every
    result.figures[f"{table}: a retraction every {every} steps, share of a step"] = retraction / (step + retraction)
    return step + retraction
