"""Every router in the same small ViT on scikit-learn's digits: accuracy, balance, and what the batch does to it.

A ViT (8 px, patch 2, width 48, depth 4; 8 experts in blocks 1 and 3, 2 a token where that has a meaning) is trained
from scratch with the same data order and budget for every router. A queue that resumes: one JSON a run, and runs that
have one are not repeated.

    python benchmarks/routers_digits.py [--seeds 3] [--threads 2]

About 15 minutes on 2 cores. Digits are easy: read the columns on balance and batch dependence first.
"""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import tyro
from rich.progress import track
from sklearn.datasets import load_digits
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ermoe
from ermoe.files import replacing
from ermoe.models.vit import SparseVisionTransformer
from ermoe.studies.record import commit, machine, versions

RESULTS = Path(__file__).parent / "results" / "routers_digits"
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
    "v-moe": {"router": "v-moe"},
    "v-moe-no-limit": {"router": "v-moe", "eval_capacity_factor": None},
    "expert-choice": {"router": "expert-choice"},
    "soft": {"router": "soft", "capacity_factor": 2.0},
    "base": {"router": "base"},
}


@dataclass(frozen=True)
class Study:
    """Train every router on digits, over several seeds."""

    seeds: int = 3
    epochs: int = 30
    batch: int = 64
    rate: float = 3e-3
    decay: float = 0.05
    threads: int = 2


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


def train(model: nn.Module, data: Data, study: Study, seed: int) -> None:
    """AdamW with a cosine schedule, and everything that belongs to a step of any router."""
    exempt = ermoe.no_weight_decay(model)
    decayed = {name for name, p in model.named_parameters() if p.dim() > 1 and name not in exempt}
    groups = [
        {"params": [p for name, p in model.named_parameters() if name in decayed], "weight_decay": study.decay},
        {"params": [p for name, p in model.named_parameters() if name not in decayed], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=study.rate)
    steps = study.epochs * (len(data.train) // study.batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, study.rate, steps, pct_start=0.1)
    order = torch.Generator().manual_seed(seed)
    model.train()
    for _ in range(study.epochs):
        for rows in torch.randperm(len(data.train), generator=order).split(study.batch):
            if len(rows) < study.batch:
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


def run(method: str, seed: int, data: Data, study: Study) -> dict[str, Any]:
    """One training run and its record."""
    model = build(method, seed)
    train(model, data, study, seed)
    return {
        "method": method,
        "seed": seed,
        "sparsity": METHODS[method],
        "figures": evaluate(model, data),
        "parameters": sum(p.numel() for p in model.parameters()),
        "command": f"python benchmarks/routers_digits.py --seeds {study.seeds}",
        "study": asdict(study),
        "commit": commit(),
        "machine": machine(),
        "versions": versions(),
    }


COLUMNS = {
    "top1": ("accuracy", "{:.2%}"),
    "load_cv2": ("load CV²", "{:.3f}"),
    "weight_cv2": ("weight CV²", "{:.3f}"),
    "max_load": ("max load", "{:.2f}"),
    "drop_rate": ("dropped", "{:.1%}"),
    "unserved_rate": ("unserved", "{:.1%}"),
    "batch_effect": ("batch effect", "{:.0e}"),
}


def table(records: list[dict[str, Any]]) -> str:
    """Means over seeds, one row a method, in Markdown; the batch effect is the largest."""
    lines = ["| router | " + " | ".join(title for title, _ in COLUMNS.values()) + " |"]
    lines.append("| :-- |" + " --: |" * len(COLUMNS))
    for method in METHODS:
        own = [record["figures"] for record in records if record["method"] == method]
        cells = []
        for name, (_, style) in COLUMNS.items():
            values = [figures[name] for figures in own if figures.get(name) == figures.get(name) and name in figures]
            average = max if name == "batch_effect" else statistics.fmean
            cells.append(style.format(average(values)) if values else "–")
        if own and len(own) > 1:
            cells[0] += f" ± {statistics.stdev(figures['top1'] for figures in own):.2%}"
        lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(study: Study) -> None:
    torch.set_num_threads(study.threads)
    data = digits()
    records = []
    queue = [(method, seed) for seed in range(1, study.seeds + 1) for method in METHODS]
    for method, seed in track(queue, description="digits"):
        path = RESULTS / f"{method}-{seed}.json"
        if not path.is_file():
            with replacing(path) as draft:
                draft.write_text(json.dumps(run(method, seed, data, study), indent=1, ensure_ascii=False) + "\n")
        records.append(json.loads(path.read_text()))
    print(table(records))


if __name__ == "__main__":
    main(tyro.cli(Study))
