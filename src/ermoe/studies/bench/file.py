"""`ermoe bench file`: an upcycled DeiT-Tiny as an ONNX file, beside the model itself."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

from ermoe.errors import UserError
from ermoe.models.export import export
from ermoe.models.merge import merge
from ermoe.models.upcycle import upcycle
from ermoe.studies.bench.measure import compare, inferring, take_turns
from ermoe.studies.bench.result import Bar, Result

_EAGER, _MERGED = "torch", "torch, merged"
_SPARSE, _STATIC = "onnxruntime, sparse", "onnxruntime, every expert"
_ARGUMENTS: dict[str, Any] = {}  # of timm's DeiT-Tiny; none: as published
_PATHS = {_SPARSE: "sparse", _STATIC: "every-expert"}


def run(*, images: int, rounds: int, threads: int) -> Result:
    """Exact files of both kinds; merged, a model has the weights that its file has."""
    torch.set_num_threads(threads)
    capability = torch.backends.cpu.get_cpu_capability()
    settings = {"images": images, "rounds": rounds, "threads": threads, "instructions": capability}
    result = Result("file", settings, reference=_EAGER)
    generator = torch.Generator().manual_seed(0)
    pictures = torch.randn(images, 3, 224, 224, generator=generator)
    model = _upcycled(generator)
    merged = merge(model)
    with TemporaryDirectory() as folder:
        files = {name: export(model, Path(folder) / f"{path}.onnx", path=path).file for name, path in _PATHS.items()}
        work = {_EAGER: inferring(model, pictures), _MERGED: inferring(merged, pictures)}
        work |= {name: _session(file, pictures, threads) for name, file in files.items()}
        table = "upcycled DeiT-Ti, inference"
        result.tables[table] = compare(take_turns(work, rounds=rounds), _EAGER)
        expected = np.asarray(work[_EAGER]())
        off = {name: float(np.abs(np.asarray(work[name]()) - expected).max() / expected.std()) for name in files}
    result.bars = [
        Bar("inference, sparse ONNX / torch", result.ratio(table, _SPARSE), 1.2),
        Bar("inference, sparse ONNX / torch, merged", result.ratio(table, _SPARSE, to=_MERGED), 1.2),
        Bar("largest difference of sparse ONNX, in deviations", off[_SPARSE], 1e-4),
    ]
    return result


def _upcycled(generator: torch.Generator) -> nn.Module:
    """Random weights of DeiT-Tiny's shape; its experts are moved apart, so that it matters who takes a token."""
    torch.manual_seed(0)
    model = upcycle(timm.create_model("deit_tiny_patch16_224", **_ARGUMENTS).eval(), generator=generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.02 * parameter.abs().mean() * torch.randn(parameter.shape, generator=generator))
    return model


def _session(file: Path, pictures: Tensor, threads: int) -> Callable[[], Any]:
    try:
        import onnxruntime
    except ImportError as problem:
        raise UserError("this benchmark needs onnxruntime: pip install 'ermoe[export]'") from problem
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(file, options)
    return lambda: session.run(None, {"images": pictures.numpy()})[0]
