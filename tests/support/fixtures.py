"""Data and trained models that several tests share, each made once."""

import io
import os
from functools import lru_cache
from itertools import pairwise
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def cifar():
    """CIFAR-10 images and labels by split, a function of a slice: ``cifar("test", slice(0, 512))``."""
    import numpy as np
    import torch
    from PIL import Image

    folder = os.environ.get("ERMOE_DATA")
    if folder is None:
        pytest.skip("needs CIFAR-10: set ERMOE_DATA to the folder with cifar10_25k.npz")
    pack = np.load(Path(folder, "cifar10_25k.npz"))

    @lru_cache
    def stored(name):
        return pack[name]

    def read(split, chosen):
        data, bounds = stored(f"webp_{split}"), stored(f"off_{split}")
        pairs = list(pairwise(bounds))[chosen]
        images = [np.asarray(Image.open(io.BytesIO(data[a:b].tobytes())).convert("RGB")) for a, b in pairs]
        pixels = torch.from_numpy(np.stack(images)).permute(0, 3, 1, 2).float() / 127.5 - 1
        return pixels, torch.from_numpy(stored(f"y_{split}")[chosen].astype(np.int64))

    return read


@pytest.fixture(scope="session")
def trained_vit(cifar):
    """A small dense ViT, trained on CIFAR-10 long enough to have left its initialisation far behind."""
    import timm
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    small = {"img_size": 32, "patch_size": 4, "embed_dim": 96, "depth": 4, "num_heads": 3, "num_classes": 10}
    model = timm.create_model("vit_tiny_patch16_224", **small).train()
    images, labels = cifar("train", slice(0, 640))
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for step in range(40):
        rows = torch.randint(0, len(images), (16,), generator=torch.Generator().manual_seed(step))
        loss = F.cross_entropy(model(images[rows]), labels[rows])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@pytest.fixture(scope="session")
def cohort_root(tmp_path_factory):
    """Twelve coarse phantoms as a BIDS data set."""
    for package in ("nibabel", "nilearn", "monai"):
        pytest.importorskip(package)
    from ermoe.brain.data.phantom import synthesize

    return synthesize(tmp_path_factory.mktemp("phantoms") / "bids", 12, spacing_mm=6.0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cache for all runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(cohort_root, cache, tmp_path_factory):
    """A finished three-fold run of the tiny preset."""
    from rich.console import Console

    from ermoe.brain.run import train

    folder = tmp_path_factory.mktemp("runs") / "ermoe"
    train(cohort_root, folder, preset="tiny", folds=3, cache=cache, console=Console(quiet=True))
    return folder
