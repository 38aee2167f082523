"""Sparse models as files that run without ermoe: torch.export archives and ONNX graphs.

How many tokens an expert gets depends on the image, while a graph in a file would rather have fixed shapes. There are
three ways out. "every-expert" runs all experts on all tokens and weighs most of the results with zero: the numbers of
the model, at E / K times the work of its experts. "sparse" has each expert look for its tokens: the model's numbers and
its work, for readers that take shapes which depend on data, as torch and onnxruntime do. "capacity" gives each expert a
fixed number of places per image, ⌈S K f / E⌉, filled in the order of falling weight: f times the work, and tokens that
find an expert full do without it.

Letters: S tokens of an image, E experts, K experts per token.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from ermoe.errors import UserError
from ermoe.files import StrPath, replacing
from ermoe.models.merge import merge
from ermoe.models.passes import Eye, answer, evaluating, input_shape
from ermoe.nn import MoE, moe_layers
from ermoe.nn.sharding import is_sharded, whole_copy

_PATHS = ("every-expert", "sparse", "capacity")
_FORMATS = {".onnx": "onnx", ".pt2": "torch"}


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written, and how far its outputs are from the model's on random images.

    ``difference`` is the largest one, relative to the root mean square of the outputs.
    """

    file: Path
    difference: float


def export(
    model: nn.Module,
    file: StrPath,
    *,
    image_size: int | tuple[int, ...] | None = None,
    path: str = "every-expert",
    capacity_factor: float = 1.25,
    dynamic_batch: bool = True,
) -> Exported:
    """Writes a model to ``file``, as ONNX if its name ends in .onnx and as a torch.export archive if in .pt2.

    A model whose experts are on several processes is exported by all of them together; the first writes the file.

    Args:
        image_size: of the images it will get; by default the model's own; fixed in the file.
        path: "every-expert" (exact, E / K times the experts' work), "sparse" (exact, the experts' own work, shapes that
            depend on data) or "capacity" (cheap, static shapes, drops some pairs).
        capacity_factor: f of the capacity path. Places for f = E / K would suffice for every token.
        dynamic_batch: whether the file takes any number of images at once, or one.
    """
    file = Path(file)
    if file.suffix not in _FORMATS:
        raise UserError(f"{file}: the name decides the format, so end it in .onnx or .pt2")
    if path not in _PATHS:
        raise UserError(f"path={path!r}: use 'every-expert' (exact), 'sparse' (exact and cheaper) or 'capacity'")
    if file.suffix == ".onnx" and next(model.parameters()).dtype == torch.bfloat16:
        raise UserError(f"{file}: onnxruntime knows no bfloat16; export model.float(), or to a name that ends in .pt2")
    if file.suffix == ".onnx":
        _need("onnx", "onnxscript", "onnxruntime")
    shape = (2 if dynamic_batch else 1, *input_shape(model, image_size))
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(next(model.parameters()))
    with torch.no_grad(), evaluating(model):
        expected = _TensorOutput(model)(images)
    traceable = _traceable(model, path, capacity_factor, dynamic_batch=dynamic_batch)
    difference = [0.0]
    is_shared = any(map(is_sharded, model.parameters()))
    if not is_shared or dist.get_rank() == 0:
        difference[0] = _write(traceable, images, expected, file, dynamic_batch=dynamic_batch)
    if is_shared:
        dist.broadcast_object_list(difference)
    return Exported(file, difference[0])


def _write(traceable: nn.Module, images: Tensor, expected: Tensor, file: Path, *, dynamic_batch: bool) -> float:
    """Writes what is already on one of the paths; returns how far the file's outputs are from what is expected."""
    with replacing(file) as draft:
        if _FORMATS[file.suffix] == "torch":
            torch.export.save(_program(traceable, images, dynamic_batch=dynamic_batch), draft)
            outputs = torch.export.load(draft).module()(images)
        else:
            _write_onnx(traceable, images, draft, dynamic_batch=dynamic_batch)
            outputs = _run_onnx(draft, images)
    size = expected.square().mean().sqrt().clamp_min(1e-30)
    return float((outputs - expected).abs().max() / size)


def to_program(
    model: nn.Module,
    images: Tensor,
    *,
    path: str = "every-expert",
    capacity_factor: float = 1.25,
    dynamic_batch: bool = True,
) -> ExportedProgram:
    """The model, merged, as a graph of torch's own operators along one of the paths."""
    traceable = _traceable(model, path, capacity_factor, dynamic_batch=dynamic_batch)
    return _program(traceable, images, dynamic_batch=dynamic_batch)


def _program(traceable: nn.Module, images: Tensor, *, dynamic_batch: bool) -> ExportedProgram:
    with torch.no_grad():
        return torch.export.export(traceable, (images,), dynamic_shapes=_shapes(dynamic_batch))


def _traceable(model: nn.Module, path: str, capacity_factor: float, *, dynamic_batch: bool) -> nn.Module:
    """A merged copy of the model whose layers take one of the paths."""
    if dynamic_batch:
        _refuse_shared_places(model)
    model = merge(whole_copy(model), inplace=True).eval().requires_grad_(False)
    if path == "capacity":
        limit_places(model, capacity_factor)
    for layer in moe_layers(model).values():
        if path == "sparse" and isinstance(layer, MoE):
            layer.expert_by_expert = True
        else:
            layer.every_expert = path != "capacity"
    return _TensorOutput(model).eval()


def _shapes(dynamic_batch: bool) -> tuple[dict[int, Dim]] | None:
    return ({0: Dim("batch", min=1)},) if dynamic_batch else None


def _refuse_shared_places(model: nn.Module) -> None:
    for name, layer in moe_layers(model).items():
        if isinstance(layer, MoE) and layer.router.shares_places:
            raise UserError(
                f"{name}: images of a batch share the places of its experts, so its graph depends on the batch: use "
                "dynamic_batch=False (--fixed-batch), or build the model with eval_capacity_factor=None or group_size=1"
            )


def limit_places(model: nn.Module, capacity_factor: float) -> None:
    """Gives the experts of every layer a fixed number of places, in place; layers that choose nothing need none."""
    if not capacity_factor > 0:
        raise UserError(f"capacity_factor={capacity_factor}: use a positive number")
    for layer in moe_layers(model).values():
        if isinstance(layer, MoE):
            layer.static_capacity = capacity_factor


class _TensorOutput(Eye):
    """A model that returns a tensor, also if the one inside returns a record."""

    def forward(self, batch: Tensor | dict[str, Tensor]) -> Tensor:
        return answer(super().forward(batch))


def _write_onnx(traceable: nn.Module, images: Tensor, file: Path, *, dynamic_batch: bool) -> None:
    with torch.no_grad():
        torch.onnx.export(
            traceable,
            (images,),
            file,
            input_names=["images"],
            output_names=["outputs"],
            dynamic_shapes=_shapes(dynamic_batch),
            external_data=False,
            verbose=False,
        )


def _run_onnx(path: Path, images: Tensor) -> Tensor:
    import onnxruntime

    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {"images": images.cpu().numpy()})[0]).to(images.device)


def _need(*packages: str) -> None:
    absent = [package for package in packages if importlib.util.find_spec(package) is None]
    if absent:
        raise UserError(f"ONNX needs {', '.join(absent)}: install them with pip install 'ermoe[export]'")
