"""Is a sparse model that starts as a dense one worth its experts? A small ViT on CIFAR-10, fine-tuned three ways.

A dense ViT (32 px, patch 8, width 96, depth 4) is trained first, once per seed. From its weights start, with the same
data order and budget: the dense model itself, V-MoE with copied experts and a new gate, and ERMoE by eigen-upcycling
with calibrated offsets. A queue that resumes: a line a run in benchmarks/results/upcycle_cifar10.jsonl.

    python benchmarks/upcycle_cifar10.py CIFAR10_FOLDER [--seeds 3] [--threads 2]

The folder holds the binary release, cifar-10-batches-bin. About 15 minutes on 2 cores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import scipy.stats
import torch
import torch.nn.functional as F
import tyro
from rich.progress import track
from safetensors.torch import load_file, save_file
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

import ermoe
from ermoe.data.images import open_images
from ermoe.files import replacing
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Show, Table, one_row_a_name, spread

RESULTS = Path(__file__).parent / "results"
LABELS = {
    "dense": "dense",
    "v-moe": "V-MoE, copied experts, new gate",
    "ermoe": "ERMoE, eigen-upcycled, calibrated",
}
CALIBRATION_IMAGES = 512


@dataclass(frozen=True)
class Options:
    """Fine-tune dense, V-MoE and ERMoE from one dense start, over several seeds."""

    data: Annotated[Path, tyro.conf.Positional]
    """Folder with cifar-10-batches-bin."""
    seeds: int = 3
    dense_epochs: int = 12
    tune_epochs: int = 6
    batch: int = 100
    dense_rate: float = 1e-3
    tune_rate: float = 3e-4
    threads: int = 2
    out: Path = RESULTS
    cache: Path = Path("runs/upcycle_cifar10")
    """Where the dense starts are kept."""


@dataclass(frozen=True)
class Data:
    """The whole set as normalised tensors."""

    train: Tensor
    train_label: Tensor
    test: Tensor
    test_label: Tensor


def load(folder: Path) -> Data:
    tensors = []
    for split in ("train", "test"):
        images = open_images(folder, split)
        pixels = torch.stack([images.read(i) for i in range(len(images))])
        tensors += [(pixels.float() / 255 - 0.5) / 0.25, images.label_N]
    return Data(*tensors)


def batches(data: Data, size: int, generator: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
    """One epoch in random order, each batch flipped and shifted by up to four pixels."""
    for index in torch.randperm(len(data.train), generator=generator).split(size):
        dy, dx, flip = (int(torch.randint(n, (), generator=generator)) for n in (9, 9, 2))
        image = F.pad(data.train[index], (4, 4, 4, 4))[:, :, dy : dy + 32, dx : dx + 32]
        yield image.flip(-1) if flip else image, data.train_label[index]


def train(model: nn.Module, data: Data, *, epochs: int, rate: float, batch: int, seed: int, title: str) -> None:
    exempt = ermoe.no_weight_decay(model)
    parameters = dict(model.named_parameters())
    plain = {name for name, p in parameters.items() if name in exempt or p.ndim < 2}
    groups = [
        {"params": [p for name, p in parameters.items() if name not in plain], "weight_decay": 0.05},
        {"params": [parameters[name] for name in plain], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=rate)
    steps = epochs * -(-len(data.train) // batch)
    warmup = steps // 10
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, 1.0, warmup),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup),
        ],
        [warmup],
    )
    generator = torch.Generator().manual_seed(seed)
    for _ in track(range(epochs), description=title):
        model.train()
        for image, label in batches(data, batch, generator):
            loss = F.cross_entropy(model(image), label, label_smoothing=0.1)
            loss = loss + 5e-5 * ermoe.orthogonality_loss(model) + ermoe.auxiliary_loss(model)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            ermoe.update_balance(model)
        ermoe.retract(model)


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> float:
    model.eval()
    hits = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(data.test.split(500), data.test_label.split(500), strict=True)
    )
    return 100 * hits / len(data.test)


def load_cv2(model: nn.Module, data: Data) -> list[float]:
    with ermoe.record_routing(model) as routing:
        evaluate(model, data)
    return [layer["load_cv2"] for layer in routing.summary().values()]


def small_vit() -> VisionTransformer:
    return VisionTransformer(img_size=32, patch_size=8, embed_dim=96, depth=4, num_heads=3, num_classes=10)


def dense_start(options: Options, data: Data, seed: int) -> VisionTransformer:
    torch.manual_seed(seed)
    model = small_vit()
    path = options.cache / f"dense-{options.dense_epochs}-epochs-seed-{seed}.safetensors"
    if path.exists():
        model.load_state_dict(load_file(path))
        return model
    settings = {"epochs": options.dense_epochs, "rate": options.dense_rate, "batch": options.batch}
    train(model, data, **settings, seed=seed, title=f"dense start, seed {seed}")
    with replacing(path) as draft:
        save_file(model.state_dict(), draft)
    return model


def eigen(start: VisionTransformer, data: Data) -> nn.Module:
    model = ermoe.upcycle(start)
    ermoe.calibrate(model, [data.train[:CALIBRATION_IMAGES]])
    return model


VARIANTS: dict[str, Callable[[VisionTransformer, Data], nn.Module]] = {
    "dense": lambda start, data: start,
    "ermoe": eigen,
    "v-moe": lambda start, data: ermoe.upcycle(start, router="v-moe", generator=torch.Generator().manual_seed(0)),
}


def figures_of_run(options: Options, data: Data, variant: str, seed: int) -> dict[str, Any]:
    """One fine-tuning, and the accuracy before and after the conversion."""
    start = dense_start(options, data, seed)
    before = evaluate(start, data)
    torch.manual_seed(seed)
    model = VARIANTS[variant](start, data)
    converted = evaluate(model, data)
    settings = {"epochs": options.tune_epochs, "rate": options.tune_rate, "batch": options.batch}
    train(model, data, **settings, seed=1000 + seed, title=f"{variant}, seed {seed}")
    return {
        "accuracy_dense_start": before,
        "accuracy_converted": converted,
        "accuracy": evaluate(model, data),
        "load_cv2": [] if variant == "dense" else load_cv2(model, data),
        "parameters": sum(p.numel() for p in model.parameters()),
        "train_images": len(data.train),
        "test_images": len(data.test),
    }


def table(records: list[Record]) -> Table:
    """Accuracy before and after fine-tuning, and the load of the worst layer and seed."""
    columns: dict[str, Show] = {
        "accuracy before": spread("accuracy_converted", style=".2f"),
        "after": spread("accuracy", style=".2f"),
        "by seed": lambda runs: ", ".join(f"{run['figures']['accuracy']:.2f}" for run in runs),
        "largest load CV²": lambda runs: _largest([load for run in runs for load in run["figures"]["load_cv2"]]),
    }
    return one_row_a_name(records, "start", columns, LABELS)


def pairs(records: list[Record]) -> Table:
    """Accuracy minus the dense model's, seed by seed, and the 95 % interval of their mean (Student's t)."""
    accuracy = {(record["name"], record["seed"]): record["figures"]["accuracy"] for record in records}
    seeds = sorted({seed for _, seed in accuracy})
    rows = []
    for name in dict.fromkeys(name for name, _ in accuracy if name != "dense"):
        found = [accuracy[name, seed] - accuracy["dense", seed] for seed in seeds]
        half = scipy.stats.t.ppf(0.975, len(found) - 1) * np.std(found, ddof=1) / len(found) ** 0.5
        by_seed = ", ".join(f"{one:+.2f}" for one in found)
        rows.append([LABELS.get(name, name), by_seed, f"{np.mean(found):+.2f} ± {half:.2f}"])
    return Table(["minus dense, points", "by seed", "mean, 95 % interval"], rows)


def _largest(loads: list[float]) -> str:
    return f"{max(loads):.3f}" if loads else "–"


def main(options: Options) -> None:
    torch.set_num_threads(options.threads)
    data = load(options.data)
    settings = {name: value for name, value in asdict(options).items() if name.endswith(("epochs", "batch", "rate"))}
    jobs = [
        Job(variant, seed, partial(figures_of_run, options, data, variant, seed), settings)
        for seed in range(options.seeds)
        for variant in VARIANTS
    ]
    print(table(run_queue("upcycle_cifar10", jobs, options.out / "upcycle_cifar10.jsonl")).markdown())


if __name__ == "__main__":
    main(tyro.cli(Options))
