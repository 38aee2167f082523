"""What `ermoe inspect` costs on top of a plain evaluation: time as a ratio, size of the report.

    python benchmarks/inspect_cost.py --images 10000 --rounds 3 --threads 2

A ViT of 12 blocks, width 192 and 32 pixels with 8 experts in every second block, over random images. A plain
evaluation pass and a whole inspection (pass, plots, files) take turns; what counts is the median over rounds of
(inspection − plain) / plain. Adds a line to benchmarks/results/bench.jsonl.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import timm
import torch
from rich.console import Console

import ermoe
from ermoe.data.images import ImagesInMemory
from ermoe.explorer.inspect import Settings, look_into
from ermoe.explorer.inspection import inspection_page
from ermoe.images.run import evaluate, transform_for
from ermoe.studies.bench.measure import compare, take_turns
from ermoe.studies.bench.result import Bar, Result, save, show
from ermoe.train.loader import Loader


def build_model(patch_size: int, num_classes: int) -> torch.nn.Module:
    """The model of the promise, with random weights."""
    torch.manual_seed(0)
    size = {"img_size": 32, "patch_size": patch_size, "embed_dim": 192, "depth": 12, "num_heads": 3}
    dense = timm.create_model("vit_tiny_patch16_224", num_classes=num_classes, **size)
    generator = torch.Generator().manual_seed(0)
    return ermoe.upcycle(dense, num_experts=8, init="random", inplace=True, generator=generator).eval()


def random_images(number: int, num_classes: int) -> ImagesInMemory:
    """Noise: what images show does not change what looking at them costs."""
    generator = torch.Generator().manual_seed(0)
    pixels = torch.randint(0, 256, (number, 3, 32, 32), dtype=torch.uint8, generator=generator)
    label = torch.arange(number) % num_classes
    classes = [f"class {c}" for c in range(num_classes)]
    return ImagesInMemory(pixels, summary=f"{number} random images", split="test", classes=classes, label_N=label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=10_000)
    parser.add_argument("--classes", type=int, default=10)
    parser.add_argument("--patch-size", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, images = build_model(options.patch_size, options.classes), random_images(options.images, options.classes)
    folder = Path(tempfile.mkdtemp())
    report = folder / "report.html"

    def plain() -> None:
        evaluate(model, Loader(transform_for(model).of(images), batch_size=100))

    def inspection() -> None:
        settings = Settings()
        found = {"model": look_into(model, images, settings)}
        page = inspection_page(
            found,
            data=images.summary,
            num_images=len(images),
            figures=folder / "figures",
            num_k_images=settings.k_images,
        )
        page.write(report)

    seconds = take_turns({"plain": plain, "inspection": inspection}, rounds=options.rounds, warmup=0)
    pairs = zip(seconds["inspection"], seconds["plain"], strict=True)
    extra = statistics.median(with_ / without - 1 for with_, without in pairs)
    settings = {name: value for name, value in vars(options).items() if name != "out"}
    result = Result("inspect_cost", settings, reference="plain")
    result.tables["evaluation of all images"] = compare(seconds, "plain")
    result.figures |= {"extra time over a plain pass": extra, "report MB": report.stat().st_size / 1e6}
    result.bars = [
        Bar("extra time of an inspection / plain evaluation", extra, 0.30),
        Bar("size of report.html in MB", report.stat().st_size / 1e6, 5.0),
    ]
    shutil.rmtree(folder)
    console = Console()
    show(result, console)
    console.print(f"written: {save(result, options.out)}")


if __name__ == "__main__":
    main()
