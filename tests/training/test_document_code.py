"""Python in README.md and docs/ runs as printed, on small models; tutorials run whole in tests/system."""

import re
from pathlib import Path

import pytest
import timm
import torch
import torch.nn.functional as F

import ermoe
import ermoe.models.vit  # registers its models with timm
from ermoe.nn.registry import LAYERS

ROOT = Path(__file__).parents[2]
SMALL = {"embed_dim": 128, "depth": 2, "num_heads": 2, "img_size": 32, "patch_size": 8, "num_classes": 10}
# What a page says → what is small enough to run here.
STAGED = {
    "README.md": {"img_size=32, patch_size=8": "img_size=32, patch_size=8, depth=2"},
    "docs/explanation/routers.md": {},
    "docs/how-to/calibrate.md": {},
    "docs/how-to/convert.md": {
        '"ermoe_vit_base_patch16_224", num_experts=16, rank=504': '"ermoe_vit_tiny_patch16_224", num_experts=2, rank=48'
    },
    "docs/how-to/export.md": {"model.onnx": "model.pt2", "image_size=224": "image_size=32"},
    "docs/how-to/fit-experts.md": {},
    "docs/how-to/lora.md": {},
    "docs/how-to/own-images.md": {"cifar-10-batches-bin": "digits"},
    "docs/how-to/own-router.md": {},
    "docs/how-to/runs.md": {},
    "docs/how-to/slim.md": {
        "budget=0.8, held_out=others": "budget=0.8, held_out=batches, num_experts=2, layer_epochs=1, epochs=1"
    },
    "docs/reference/measures.md": {},
}
ELSEWHERE = {
    "docs/how-to/brain-train.md": "tutorials/bids-to-report",
    "docs/how-to/explore.md": "tests/training/explorer",
    "docs/how-to/hugging-face.md": "examples/train_with_hugging_face_trainer.py, tests/training/models",
    "docs/how-to/inspect.md": "tests/training/explorer",
    "docs/how-to/save-and-load.md": "tests/unit/models",
    "docs/how-to/search-by-words.md": "tests/training/retrieval",
    "docs/how-to/several-processes.md": "tests/training/test_two_processes.py, tests/system/test_four_processes.py",
    "docs/how-to/train.md": "tests/training/images/test_image.py",
    "docs/reference/brain-scans.md": "tests/unit/brain",
}


def blocks(page):
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """What the lines of a page take for granted: a dense and a sparse model, images, labels, an optimiser."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    dense = timm.create_model("vit_tiny_patch16_224", **SMALL)
    made = timm.create_model

    def create_model(name, **options):
        return made("vit_tiny_patch16_224", **SMALL) if name == "vit_base_patch16_224" else made(name, **options)

    monkeypatch.setattr(timm, "create_model", create_model)
    model = ermoe.upcycle(dense, num_experts=4, top_k=2, below_threshold="prune")
    images, labels = torch.randn(16, 3, 32, 32), torch.arange(16) % 10
    names = {
        "torch": torch, "F": F, "timm": timm, "ermoe": ermoe, "dense": dense, "model": model, "images": images,
        "labels": labels, "batches": [images, images], "loader": [(images, labels)], "x": torch.randn(2, 17, 192),
        "my_model": torch.nn.ModuleDict({"encoder": dense}), "task_loss": lambda y: y.square().mean(),
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4),
    }  # fmt: skip
    return names


@pytest.mark.no_cover  # other tests run the same lines
@pytest.mark.parametrize("page", STAGED)
def test_the_code_of_a_page_runs(page, stage):
    code = "\n".join(blocks(page))
    for written, meant in STAGED[page].items():
        assert written in code
        code = code.replace(written, meant)
    exec(compile(code, page, "exec"), stage)
    LAYERS.pop("hash", None)  # the router that one of the pages adds


def test_every_page_with_code_is_run_somewhere():
    pages = ["README.md", *(str(path.relative_to(ROOT)) for path in ROOT.glob("docs/**/*.md"))]
    with_code = {page for page in pages if blocks(page) and not page.startswith("docs/tutorials/")}
    assert with_code == STAGED.keys() | ELSEWHERE.keys()
