"""`ermoe bench`: side-by-side benchmarks, as ratios in one run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from ermoe import cpu
from ermoe.console import say
from ermoe.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Bench:
    """Time ermoe beside its peers, all candidates in turns, and report ratios with their spread.

    `layer` compares one feed-forward layer of ViT-B with the floor (the plain matrix products that the chosen experts
    need), V-MoE, and the implementations of transformers, st-moe-pytorch and soft-moe-pytorch where these are installed
    (`pip install "ermoe[bench]"`). `parts` says where a layer's time goes at three sizes, `routing` is the cost of
    deciding, `scaling` the growth with experts, tokens, k and rank, `model` whole networks, `training` steps of small
    ones, `file` an ONNX file beside its model, `start` one prediction from the shell, `data` whether images arrive as
    fast as they are used, `scale` what two and four processes hold and send. All run on the CPU. Close other programs
    first: medians forgive a busy minute, not a busy hour.
    """

    what: Annotated[
        Literal["layer", "parts", "routing", "scaling", "model", "training", "file", "start", "data", "scale", "all"],
        tyro.conf.Positional,
    ] = "layer"
    """Which benchmark to run."""
    rounds: int = 15
    """Rounds in which every candidate runs once."""
    threads: int = 2
    """CPU threads; 0 leaves that to torch."""
    routings: tuple[Literal["natural", "balanced", "collapsed"], ...] = ("natural", "balanced", "collapsed")
    """Kinds of routing for `layer`."""
    images: int = 8
    """Images in a batch."""
    data: Path | None = None
    """CIFAR folder for `data`; without it, generated images of the same size."""
    memory: bool = True
    """Also measure peak memory, each candidate in a process of its own."""
    instructions: Literal["all", "avx2"] = "all"
    """Which of the CPU's vector instructions torch may use; `avx2` shows what narrower CPUs see."""
    out: Path = Path("runs/bench")
    """Folder for the records (bench.jsonl) and the plots."""

    def __post_init__(self) -> None:
        if self.rounds < 1 or self.images < 1 or self.threads < 0:
            raise UserError("--rounds and --images must be at least 1, --threads 0 or more")

    def __call__(self, console: Console) -> None:
        if self.instructions == "avx2":
            cpu.limit_to_avx2()
        import torch

        from ermoe.studies.bench import data, file, layer, model, parts, scale, start, training
        from ermoe.studies.bench.peers import Shape
        from ermoe.studies.bench.result import save, show

        shape, rounds, threads = Shape(images=self.images), self.rounds, self.threads or torch.get_num_threads()
        benchmarks = {
            "layer": lambda: layer.beside_peers(
                shape, rounds=rounds, threads=[threads], routings=list(self.routings), memory=self.memory
            ),
            "parts": lambda: parts.run(rounds=rounds, threads=threads),
            "routing": lambda: layer.routing(shape, rounds=rounds, threads=threads),
            "scaling": lambda: layer.scaling(shape, rounds=rounds, threads=threads),
            "model": lambda: model.run(images=self.images, rounds=rounds, threads=threads),
            "training": lambda: training.run(rounds=3 * rounds, threads=threads),
            "file": lambda: file.run(images=self.images, rounds=rounds, threads=threads),
            "start": lambda: start.run(rounds=rounds, threads=threads),
            "data": lambda: data.run(self.data, rounds=rounds, threads=threads),
            "scale": lambda: scale.run(images=self.images, rounds=rounds),
        }
        for name in benchmarks if self.what == "all" else [self.what]:
            result = benchmarks[name]()
            show(result, console)
            say(console, f"written: {save(result, self.out)}")
