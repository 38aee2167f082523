"""Reading weights from files of any usual format. Nothing is ever unpickled."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from ermoe.errors import UserError

# Where training scripts put the weights among other things.
_WRAPPERS = (
    "state_dict",
    "model",
    "model_state_dict",
    "model_state",
    "model_ema",
    "state_dict_ema",
    "teacher",
    "module",
)


def read_checkpoint(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .npz or torch file, by name, on the CPU.

    Whatever goes wrong in reading, one sentence says it: what a reader raises on damaged bytes is anybody's guess.
    """
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} is not a file: name a .safetensors, .npz, .pth, .pt or .bin file")
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        if path.suffix == ".npz":
            return _read_numpy(path)
        return _tensors(_read_torch(path), path)
    except UserError:
        raise
    except Exception as problem:
        raise UserError(
            f"{path} is damaged or no checkpoint ({first_line(problem)}): download or copy it again"
        ) from None


def _read_numpy(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}


def _read_torch(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as problem:
        if "weights_only" not in str(problem) and "Unsupported" not in str(problem):
            raise UserError(f"{path} is damaged or no checkpoint: download or copy it again") from None
        raise UserError(
            f"{path} holds Python objects besides tensors, which ermoe does not unpickle because that could run "
            "foreign code: save its state_dict as safetensors"
        ) from None


def _tensors(loaded: Any, path: Path) -> dict[str, Tensor]:
    for _ in _WRAPPERS:  # a dictionary that holds itself would be looked through for ever
        if isinstance(loaded, dict) and not _is_state(loaded):
            loaded = next((loaded[name] for name in _WRAPPERS if isinstance(loaded.get(name), dict)), None)
    if not isinstance(loaded, dict) or not _is_state(loaded):
        raise UserError(f"{path} holds no weights: need a state_dict, or a dictionary with one under 'model'")
    for name, value in loaded.items():
        if value.is_meta or value.is_quantized or value.layout is not torch.strided:
            raise UserError(f"{path} holds {name} as a sparse, quantised or empty tensor: save plain ones")
    return {name.removeprefix("module."): value for name, value in loaded.items()}


def _is_state(loaded: dict[Any, Any]) -> bool:
    return bool(loaded) and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items())


def first_line(problem: Exception) -> str:
    """What an exception says, cut to fit into a sentence."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]
