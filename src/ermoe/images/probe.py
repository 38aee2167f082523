"""Few-shot linear probes, in both readings of the paper's "5-shot" and "10-shot".

"images": a linear classifier is fitted to n images of each class. "epochs": a linear head is trained for n epochs on
all training images. Features are frozen in both; figures are means over draws with 95 % intervals.

Letters: N images, D features, C classes.
"""

from __future__ import annotations

import copy
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from scipy.special import stdtrit
from torch import Tensor, nn

from ermoe.data.images import Images
from ermoe.data.order import Order, hashed
from ermoe.errors import UserError
from ermoe.images.run import as_model, transform_for
from ermoe.train.compute import Compute, Processes
from ermoe.train.loader import Loader

READINGS = ("images", "epochs")


@dataclass(frozen=True, slots=True)
class Probe:
    """One figure: accuracy over draws, and for the reading "images" which images each draw used."""

    reading: str
    shots: int
    accuracies: list[float]
    drawn: list[list[str]]

    @property
    def mean(self) -> float:
        """Over draws."""
        return statistics.fmean(self.accuracies)

    @property
    def half_width(self) -> float:
        """Of the 95 % interval of the mean, by Student's t."""
        count = len(self.accuracies)
        return float(stdtrit(count - 1, 0.975)) * statistics.stdev(self.accuracies) / math.sqrt(count)


@dataclass(frozen=True, slots=True)
class Features:
    """Standardised by the training set: (N, D) and labels (N,) of both splits."""

    train_ND: Tensor
    train_label_N: Tensor
    test_ND: Tensor
    test_label_N: Tensor


@torch.inference_mode()
def extract(model: nn.Module, images: Images, *, batch_size: int = 100, workers: int = 0) -> Tensor:
    """What the model's last layer would see, (N, D)."""
    if not hasattr(model, "reset_classifier"):
        raise UserError(f"{type(model).__name__} has no reset_classifier: probe a timm model")
    backbone: Any = copy.deepcopy(model).eval()
    backbone.reset_classifier(0)
    compute = Compute(Processes(device=next(model.parameters()).device), workers=workers)
    loader = Loader(transform_for(model).of(images), batch_size=batch_size, compute=compute)
    return torch.cat([backbone(as_model(model, batch.image)).float().cpu() for batch in loader])


def features(model: nn.Module, train: Images, test: Images, *, workers: int = 0) -> Features:
    """Both splits through the frozen model."""
    train_ND, test_ND = extract(model, train, workers=workers), extract(model, test, workers=workers)
    mean_D, std_D = train_ND.mean(0), train_ND.std(0).clamp_min(1e-6)
    return Features((train_ND - mean_D) / std_D, train.label_N, (test_ND - mean_D) / std_D, test.label_N)


def probe(given: Features, train: Images, *, reading: str, shots: int, draws: int = 5, seed: int = 0) -> Probe:
    """Accuracy on the test set with ``shots`` images or epochs, over ``draws`` draws."""
    check_request(reading, shots, draws)
    accuracies, drawn = [], []
    for draw in range(draws):
        if reading == "images":
            index_M = draw_shots(train.label_N, shots, len(train.classes), seed, draw)
            accuracies.append(_fit_to_few(given, index_M))
            drawn.append([train.name(index) for index in index_M.tolist()])
        else:
            accuracies.append(_train_head(given, shots, len(train.classes), seed, draw))
    return Probe(reading, shots, accuracies, drawn)


def check_request(reading: str, shots: int, draws: int) -> None:
    """Refuses what `probe` cannot do, for those who want to know before they compute features."""
    if reading not in READINGS:
        raise UserError(f"reading={reading!r}: use one of {', '.join(READINGS)}")
    if shots < 1:
        raise UserError(f"shots={shots}: need at least 1")
    if draws < 5:
        raise UserError(f"draws={draws}: an interval needs at least 5")


def draw_shots(label_N: Tensor, shots: int, num_classes: int, seed: int, draw: int) -> np.ndarray:
    """``shots`` images of every class, chosen by (seed, draw).

    >>> label = torch.tensor([0, 1, 0, 1, 1])
    >>> label[draw_shots(label, 2, 2, seed=0, draw=0)].tolist()
    [0, 0, 1, 1]
    """
    label = label_N.numpy()
    order = np.argsort(hashed(seed, draw, np.arange(len(label))), kind="stable")
    chosen = [order[label[order] == c][:shots] for c in range(num_classes)]
    if (fewest := min(len(index) for index in chosen)) < shots:
        raise UserError(f"shots={shots}: one class has only {fewest} training images")
    return np.concatenate(chosen)


def _fit_to_few(given: Features, index_M: np.ndarray) -> float:
    from sklearn.linear_model import LogisticRegression

    classifier = LogisticRegression(max_iter=1000)
    classifier.fit(given.train_ND[index_M].numpy(), given.train_label_N[index_M].numpy())
    return float(classifier.score(given.test_ND.numpy(), given.test_label_N.numpy()))


def _train_head(given: Features, epochs: int, num_classes: int, seed: int, draw: int, lr: float = 1e-2) -> float:
    """AdamW with a cosine to zero, batches of 100."""
    order = Order(len(given.train_ND), min(100, len(given.train_ND)), seed=int(hashed(seed, draw)[0] >> 1))
    torch.manual_seed(order.seed)
    head = nn.Linear(given.train_ND.shape[1], num_classes)
    optimizer = torch.optim.AdamW(head.parameters(), lr=lr, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs * order.steps_per_epoch)
    for epoch in range(epochs):
        for index_B in order.batches(epoch):
            rows = torch.from_numpy(index_B)
            optimizer.zero_grad()
            F.cross_entropy(head(given.train_ND[rows]), given.train_label_N[rows]).backward()
            optimizer.step()
            schedule.step()
    with torch.no_grad():
        return float((head(given.test_ND).argmax(1) == given.test_label_N).double().mean())


def record_path(model: str, data: str, out: Path | None = None) -> Path:
    """Where the figures of a model on a data set go, known to be writable: ``probe-DATA.json`` in the folder ``out``.

    By default that is the run or model folder ``model`` itself, or beside it where nothing can be written into it; for
    a repository of the hub, ``runs/probe/OWNER--NAME``.
    """
    name = f"probe-{Path(data).expanduser().resolve().name}.json"
    if out is not None:
        candidates = [out / name]
    elif (folder := Path(model)).is_dir():
        candidates = [folder / name, folder.resolve().with_name(f"{folder.resolve().name}-{name}")]
    else:
        candidates = [Path("runs/probe", model.replace("/", "--"), name)]
    path = next((path for path in candidates if _can_write_into(path.parent)), None)
    if path is None:
        raise UserError(f"{candidates[0]} cannot be written: name another folder with --out")
    return path


def _can_write_into(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
