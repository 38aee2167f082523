"""Every router in the same small ViT on scikit-learn's digits: accuracy, balance, and what the batch does to it.

A ViT (8 px, patch 2, width 48, depth 4; 8 experts in blocks 1 and 3, 2 a token where that has a meaning) is trained
from scratch with the same data order and budget for every router. A queue that resumes: a line a run in
benchmarks/results/routers_digits.jsonl.

    python benchmarks/routers_digits.py [--seeds 3] [--threads 2]

About 15 minutes on 2 cores. Digits are easy: read the columns on balance and batch dependence first.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ermoe
from ermoe.models.vit import SparseVisionTransformer
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name, spread

RESULTS = Path(__file__).parent / "results"
SIZE = {"img_size": 8, "patch_size": 2, "in_chans": 1, "num_classes": 10}
SIZE |= {"embed_dim": 48, "depth": 4, "num_heads": 4, "mlp_ratio": 2}

METHODS: dict[str, dict[str, Any] | None] = {
    "dense": None,
    "eigen": {"router": "eigen"},
    "eigen-mean": {"router": "eigen", "balance": "mean"},
    "eigen-none": {"router": "eigen", "balance": "none"},
    "eigen-dense-experts": {"router": "eigen", "experts": "dense"},
    "eigen-logit": {"router": "eigen", "score": "logit", "balance": "none"},
    "logit": {"router": "logit"},
    "loss-free": {"router": "loss-free"},
    "cosine": {"router": "cosine"},
    "emoe": {"router": "emoe"},
    "v-moe": {"router": "v-moe"},
    "v-moe-no-limit": {"router": "v-moe", "eval_capacity_factor": None},
    "expert-choice": {"router": "expert-choice"},
    "soft": {"router": "soft", "capacity_factor": 2.0},
    "base": {"router": "base"},
}


@dataclass(frozen=True)
class Budget:
    """Train every router on digits, over several seeds."""

    seeds: int = 3
    epochs: int = 30
    batch: int = 64
    rate: float = 3e-3
    decay: float = 0.05
    threads: int = 2
    out: Path = RESULTS


@dataclass(frozen=True)
class Data:
    """The whole set; a third of it for testing."""

    train: Tensor
    train_label: Tensor
    test: Tensor
    test_label: Tensor


def digits() -> Data:
    """Images (N, 1, 8, 8) in [−1, 1], in an order fixed for all runs."""
    loaded = load_digits()
    images = torch.from_numpy(loaded.images).float().unsqueeze(1) / 8 - 1
    labels = torch.from_numpy(loaded.target).long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[600:], order[:600]
    return Data(images[train], labels[train], images[test], labels[test])


def build(method: str, seed: int) -> nn.Module:
    """The model of one run."""
    torch.manual_seed(seed)
    sparsity = METHODS[method]
    if sparsity is None:
        return VisionTransformer(**SIZE)
    return SparseVisionTransformer(**SIZE, num_experts=8, blocks=[1, 3], **sparsity)


def train(model: nn.Module, data: Data, budget: Budget, seed: int) -> None:
    """AdamW with a cosine schedule, and everything that belongs to a step of any router."""
    exempt = ermoe.no_weight_decay(model)
    decayed = {name for name, p in model.named_parameters() if p.dim() > 1 and name not in exempt}
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": budget.decay},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=budget.rate)
    steps = budget.epochs * (len(data.train) // budget.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, budget.rate, steps, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(budget.epochs):
        for rows in torch.randperm(len(data.train), generator=order).split(budget.batch):
            if len(rows) < budget.batch:
                continue
            loss = F.cross_entropy(model(data.train[rows]), data.train_label[rows], label_smoothing=0.1)
            loss = loss + 5e-5 * ermoe.orthogonality_loss(model) + ermoe.auxiliary_loss(model)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            ermoe.update_balance(model)
        ermoe.retract(model)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> dict[str, float]:
    """Accuracy, the worst layer's balance, and how much an image's logits change when it comes alone."""
    model.eval()
    together = model(data.test)
    alone = torch.cat([model(image) for image in data.test.split(1)])
    figures = {
        "top1": float((together.argmax(-1) == data.test_label).float().mean()),
        "top1_alone": float((alone.argmax(-1) == data.test_label).float().mean()),
        "batch_effect": float((together - alone).abs().max()),
    }
    if not hasattr(model, "sparsity"):
        return figures
    with ermoe.record_routing(model) as routing:
        for images in data.test.split(64):
            model(images)
    layers = routing.summary().values()
    worst = {"load_cv2", "weight_cv2", "max_load", "drop_rate", "unserved_rate"}
    return figures | {name: max(layer[name] for layer in layers) for name in sorted(worst)}


def figures_of_run(method: str, seed: int, data: Data, budget: Budget) -> dict[str, Any]:
    """One training run."""
    model = build(method, seed)
    train(model, data, budget, seed)
    return {**evaluate(model, data), "parameters": sum(p.numel() for p in model.parameters())}


def table(records: list[Record]) -> Table:
    """Mean ± standard deviation over seeds, one row a method; the batch effect is the largest."""
    columns: dict[str, Show] = {
        "accuracy": spread("top1"),
        "load CV²": spread("load_cv2", style=".3f"),
        "weight CV²": spread("weight_cv2", style=".3f"),
        "max load": spread("max_load", style=".2f"),
        "dropped": spread("drop_rate", style=".1%"),
        "unserved": spread("unserved_rate", style=".1%"),
        "batch effect": lambda runs: f"{max(run['figures']['batch_effect'] for run in runs):.1g}",
    }
    return one_row_a_name(records, "router", columns)


def main(budget: Budget) -> None:
    torch.set_num_threads(budget.threads)
    data = digits()
    settings = {name: value for name, value in asdict(budget).items() if name not in ("seeds", "threads", "out")}
    jobs = [
        Job(method, seed, partial(figures_of_run, method, seed, data, budget), {**settings, "sparsity": sparsity})
        for seed in range(1, budget.seeds + 1)
        for method, sparsity in METHODS.items()
    ]
    print(table(run_queue("routers_digits", jobs, budget.out / "routers_digits.jsonl")).markdown())


if __name__ == "__main__":
    main(tyro.cli(Budget))
