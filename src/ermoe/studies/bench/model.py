"""`ermoe bench model`: a whole ViT-B/16 in inference, and a training step of the CIFAR miniature."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.images.presets import recipe
from ermoe.nn import orthogonality_loss, update_balance
from ermoe.nn.rivals.losses import auxiliary_loss
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


def miniature_of_equal_flops() -> nn.Module:
    """The dense miniature whose feed-forward networks in blocks 1 and 3 are as wide as the two experts of a token."""
    dense = recipe("cifar-dense")
    model: Any = dense.build(num_classes=10)
    wide: Any = replace(dense, model_args={**dense.model_args, "mlp_ratio": 8.0}).build(num_classes=10)
    for block in (1, 3):
        model.blocks[block].mlp = wide.blocks[block].mlp
    return cast(nn.Module, model)


def training_step_of(model: nn.Module, batches: Iterator[tuple[Tensor, Tensor]]) -> Callable[[], object]:
    """Forward, backward, optimiser and everything else that belongs to a step of this model, to its end."""
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def run() -> None:
        images, labels = next(batches)
        loss = F.cross_entropy(model(images), labels) + 5e-5 * orthogonality_loss(model) + auxiliary_loss(model)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_balance(model)
        torch.get_device_module(images.device).synchronize()

    return run


def run(*, images: int, rounds: int, threads: int) -> Result:
    """Both parts."""
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

    torch.manual_seed(0)
    batches = itertools.repeat((torch.randn(100, 3, 32, 32), torch.randint(0, 10, (100,))))
    steps = {"dense of equal active FLOPs": training_step_of(miniature_of_equal_flops(), batches)}
    for method in ("dense", "ermoe", "v-moe", "gate"):
        steps[method] = training_step_of(recipe(f"cifar-{method}").build(num_classes=10), batches)
    training = "CIFAR miniature, training step of 100 images"
    result.tables[training] = compare(take_turns(steps, rounds=3 * rounds), "dense of equal active FLOPs")

    peak = {name: parameters[name] + beyond[name] for name in names}
    result.bars = [
        Bar("inference, paper-b16 / V-MoE", result.ratio(inference, _PAPER, to=_VMOE), 0.98),
        Bar("peak memory with parameters, paper-b16 / V-MoE", peak[_PAPER] / peak[_VMOE], 1.0),
        Bar(
            "inference, upcycled with dense experts / V-MoE",
            result.ratio(inference, "ermoe upcycled, dense experts", to=_VMOE),
            1.08,
        ),
        Bar("training step, ERMoE / dense of equal active FLOPs", result.ratio(training, "ermoe"), 1.35),
        Bar("training step, ERMoE / V-MoE", result.ratio(training, "ermoe", to="v-moe"), 1.05),
    ]
    return result
