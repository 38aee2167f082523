"""``ermoe export``: a saved model as a file that runs without ermoe."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro
from rich.console import Console

from ermoe.console import say
from ermoe.errors import UserError

_SUFFIX = {"onnx": ".onnx", "torch": ".pt2"}


@dataclass(frozen=True, slots=True)
class Export:
    """Write a saved model as ONNX, or as a torch.export archive, and check its outputs against the model's.

    Along the path "every-expert" the file runs all experts on all tokens: exact, with fixed shapes, at E / K times the
    work of the experts. Along "sparse" each expert looks for its own tokens: exact and as cheap as the model, for
    readers that take shapes which depend on data, such as onnxruntime. Along "capacity" experts have a fixed number of
    places per image: cheap, with fixed shapes, and tokens that find an expert full do without it. The file is made and
    checked on the CPU.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run folder, a model folder, or a repository of the Hugging Face hub."""
    to: Literal["onnx", "torch"] = "onnx"
    """Format of the file."""
    out: Path | None = None
    """The file, or a folder for model.onnx or model.pt2; by default the model's own folder."""
    image_size: int | None = None
    """Edge of the images in pixels; by default the model's own."""
    path: Literal["every-expert", "sparse", "capacity"] = "every-expert"
    """How tokens reach their experts."""
    capacity_factor: float = 1.25
    """Places of an expert along the capacity path, as a multiple of an equal share."""
    fixed_batch: bool = False
    """One image at a time, instead of any number."""

    def __call__(self, console: Console) -> None:
        from ermoe.models.export import export
        from ermoe.models.io import load
        from ermoe.train.run_folder import model_folder

        model = model_folder(self.model)
        out = self._target(Path(model))
        exported = export(
            load(model),
            out,
            image_size=self.image_size,
            path=self.path,
            capacity_factor=self.capacity_factor,
            dynamic_batch=not self.fixed_batch,
        )
        say(console, f"{exported.file}: outputs differ from the model's by {exported.difference:.1e} of their size")

    def _target(self, model: Path) -> Path:
        suffix = _SUFFIX[self.to]
        out = self.out or (model if model.is_dir() else Path("."))
        if out.suffix == suffix:
            return out
        if out.suffix in _SUFFIX.values():
            raise UserError(f"--out {out}: a file for --to {self.to} ends in {suffix}")
        return out / f"model{suffix}"
