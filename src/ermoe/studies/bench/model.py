"""`ermoe bench model`: a whole ViT-B/16 in inference, its time and its memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ermoe.images.presets import recipe
from ermoe.studies.bench.measure import compare, inferring, peak_megabytes, take_turns
from ermoe.studies.bench.result import Bar, Result

_PAPER, _VMOE, _DENSE = "ermoe paper-b16", "V-MoE", "dense ViT-B/16"
# What each model is called here, its preset, and what differs: V-MoE drops nothing, so that both do all their work.
_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    _DENSE: ("b16-dense", {}),
    _VMOE: ("b16-v-moe", {"capacity_factor": None}),
    _PAPER: ("paper-ermoe", {}),
    "ermoe upcycled, dense experts": ("b16-ermoe", {"experts": "dense"}),
    "ermoe upcycled, full rank": ("b16-ermoe", {}),
}


def _vit_b16(name: str) -> nn.Module:
    """ViT-B/16 with random weights, sparse in every second block unless ``name`` is the dense one."""
    preset, changes = _MODELS[name]
    chosen = recipe(preset)
    sparsity = None if chosen.sparsity is None else {**chosen.sparsity, **changes}
    return replace(chosen, sparsity=sparsity, init="random").build(num_classes=1000).eval()


def _build_inference(name: str, images: int, threads: int) -> Callable[[], object]:
    """One model ready to run, for the process that measures its memory."""
    torch.set_num_threads(threads)
    return inferring(_vit_b16(name), torch.randn(images, 3, 224, 224))


def run(*, images: int, rounds: int, threads: int) -> Result:
    """All models in turns, then the memory of each in a process of its own."""
    torch.set_num_threads(threads)
    result = Result("model", {"images": images, "rounds": rounds, "threads": threads}, reference="first row")
    pictures = torch.randn(images, 3, 224, 224, generator=torch.Generator().manual_seed(0))
    names = list(_MODELS)
    models = {name: _vit_b16(name) for name in names}
    parameters = {name: sum(p.nbytes for p in model.parameters()) / 2**20 for name, model in models.items()}
    work = {name: inferring(model, pictures) for name, model in models.items()}
    inference = "ViT-B/16 at 224 px, inference"
    result.tables[inference] = compare(take_turns(work, rounds=rounds), _DENSE)
    del work, models
    beyond = {name: peak_megabytes(_build_inference, name, images, threads) for name in names}
    result.figures |= {f"parameters MB, {name}": parameters[name] for name in names}
    result.figures |= {f"peak memory MB beyond parameters, {name}": beyond[name] for name in names}

    peak = {name: parameters[name] + beyond[name] for name in names}
    result.bars = [
        Bar("inference, paper-b16 / V-MoE", result.ratio(inference, _PAPER, to=_VMOE), 0.98),
        Bar("peak memory with parameters, paper-b16 / V-MoE", peak[_PAPER] / peak[_VMOE], 1.0),
        Bar(
            "inference, upcycled with dense experts / V-MoE",
            result.ratio(inference, "ermoe upcycled, dense experts", to=_VMOE),
            1.08,
        ),
    ]
    return result
