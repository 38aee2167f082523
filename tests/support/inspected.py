"""What `ermoe inspect` is shown in tests."""

import timm
import torch

import ermoe
from ermoe.explorer.inspect import Settings, inspect

SIZE = {"img_size": 8, "patch_size": 2, "embed_dim": 32, "depth": 4, "num_heads": 2, "num_classes": 10}


def model(router="eigen", seed=0, **options):
    torch.manual_seed(seed)
    dense = timm.create_model("vit_tiny_patch16_224", **SIZE)
    generator = torch.Generator().manual_seed(seed)
    return ermoe.upcycle(dense, num_experts=4, router=router, init="random", generator=generator, **options).eval()


def write_report(folder):
    """Two models side by side; the second is a run that kept its evaluations."""
    ermoe.save(model(), folder / "first")
    run = folder / "second"
    ermoe.save(model("v-moe", seed=1), run / "model")
    (run / "config.json").write_text("{}")
    lines = [
        '{"step": 9, "kind": "test", "top1": 0.5}',
        '{"step": 18, "kind": "test", "top1": 0.6, "fluctuation": 0.25}',
    ]
    (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    settings = Settings(k_images=40, batch_size=200)
    return inspect([str(folder / "first"), str(run)], "digits", folder / "out", settings=settings)
