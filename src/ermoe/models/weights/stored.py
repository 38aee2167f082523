"""Files of weights: what they declare, before anything is read or built, and the tensors they hold.

Nothing is ever unpickled but tensors and plain values, and nothing is unpacked that would fill the memory.
"""

from __future__ import annotations

import pickle
import threading
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules import module as registration

from ermoe.errors import UserError
from ermoe.files import StrPath, file_size, printable

# Where training scripts put the weights among other things.
_WRAPPERS = (
    "state_dict", "model", "model_state_dict", "model_state", "model_ema", "state_dict_ema", "teacher", "module",
)  # fmt: skip
_TYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_LARGEST_RATIO, _ALWAYS_FINE = 20, 2**26
"""Weights hardly shrink when they are packed: an archive that unpacks to more than this times its size is a trap."""
_FEW_TENSORS, _MANY_TENSORS, _FEW_VALUES, _SMALL = 500, 4000, 2**26, 2**16
"""Tensors that a model may have beside its weights, and without any; values; and what no usual number exceeds."""


class Declared(NamedTuple):
    """What the header of a safetensors file says: its tensors, without values, and the notes beside them."""

    tensors: dict[str, Tensor]
    notes: Mapping[str, str]


def declared(path: StrPath) -> Declared:
    """The tensors of a safetensors file on the meta device: names, shapes and types; none of them is read."""
    path = _existing(path)
    try:
        with safe_open(path, framework="pt") as weights:
            forms = {name: weights.get_slice(name) for name in weights.keys()}  # noqa: SIM118 (no mapping)
            tensors = {
                name: torch.empty(form.get_shape(), dtype=_TYPES[form.get_dtype()], device="meta")
                for name, form in forms.items()
            }
            return Declared(tensors, weights.metadata() or {})
    except KeyError as problem:
        raise UserError(f"{printable(path)} holds tensors of the type {problem}: save plain ones") from None
    except Exception as problem:
        raise _damaged(path, problem) from None


@contextmanager
def no_larger_than(weights: Mapping[str, Tensor], path: Path) -> Iterator[None]:
    """Refuses, while it is built, a model that needs many more tensors or values than there are ``weights`` for.

    A configuration of a few bytes can ask for a million blocks: numbers are checked where they become parts of a model,
    whatever they are called and wherever they stand. ``path`` is the configuration, for the message.
    """
    # Feed-forward networks are built before experts replace them.
    most_tensors = _FEW_TENSORS + 4 * len(weights) if weights else _MANY_TENSORS
    most_values = _FEW_VALUES + 8 * sum(tensor.numel() for tensor in weights.values())
    num_tensors, num_values, builder = 0, 0, threading.get_ident()

    def count(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        nonlocal num_tensors, num_values
        if tensor is None or threading.get_ident() != builder:
            return
        num_tensors, num_values = num_tensors + 1, num_values + tensor.numel()
        if num_tensors > most_tensors or num_values > most_values:
            raise UserError(
                f"{printable(path)} describes a much larger model than the weights beside it are for: the two do not "
                "belong together; copy both again"
            )

    with ExitStack() as hooks:
        for register in (
            registration.register_module_parameter_registration_hook,
            registration.register_module_buffer_registration_hook,
        ):
            hooks.callback(register(count).remove)
        yield


def check_numbers(description: Any, weights: Mapping[str, Tensor], path: Path) -> None:
    """Refuses whole numbers that are larger than every size in the weights, and than those of any small model."""
    sizes = (size for tensor in weights.values() for size in tensor.shape)
    limit = max(_SMALL, max(sizes, default=0))
    for name, number in _numbers(description):
        if abs(number) > limit:
            raise UserError(
                f"{printable(path)} has {name} = {str(number)[:20]}, and no weight beside it is that large: the two do "
                "not belong together; copy both again"
            )


def _numbers(value: Any, name: str = "") -> Iterator[tuple[str, int]]:
    if isinstance(value, int):
        yield name, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, key)
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, name)


def check_archive(path: StrPath) -> None:
    """Refuses what is no plain file, and an archive (.npz, torch's) that unpacks to far more than its size."""
    size = file_size(path)
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked = sum(entry.file_size for entry in archive.infolist())
    if unpacked > _ALWAYS_FINE + _LARGEST_RATIO * size:
        raise UserError(
            f"{printable(path)} has {size:,} bytes and unpacks to {unpacked:,}, which weights do not: it may have been "
            "made to fill the memory; get it from elsewhere"
        )


def read_checkpoint(path: StrPath) -> dict[str, Tensor]:
    """The tensors of a .safetensors, .npz or torch file, by name, on the CPU.

    Whatever goes wrong in reading, one sentence says it: what a reader raises on damaged bytes is anybody's guess.
    """
    path = _existing(path)
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        check_archive(path)
        if path.suffix == ".npz":
            return _read_numpy(path)
        return _tensors(_read_torch(path), path)
    except UserError:
        raise
    except Exception as problem:
        raise _damaged(path, problem) from None


def _existing(path: StrPath) -> Path:
    path = Path(path)
    remedy = "name a .safetensors, .npz, .pth, .pt or .bin file"
    if not path.exists():
        raise UserError(f"{printable(path)} is not a file: {remedy}")
    file_size(path, remedy)
    return path


def _damaged(path: Path, problem: Exception) -> UserError:
    return UserError(
        f"{printable(path)} is damaged or no checkpoint ({first_line(problem)}): download or copy it again"
    )


def _read_numpy(path: Path) -> dict[str, Tensor]:
    with np.load(path, allow_pickle=False) as arrays:
        return {name: torch.from_numpy(np.ascontiguousarray(arrays[name])) for name in arrays.files}


def _read_torch(path: Path) -> Any:
    try:
        with warnings.catch_warnings():  # about what is refused anyway
            warnings.simplefilter("ignore")
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
        if value.numel() * value.element_size() > value.untyped_storage().nbytes():
            raise UserError(f"{path} holds {name} as a view that is larger than its memory: save plain tensors")
    return {name.removeprefix("module."): value for name, value in loaded.items()}


def _is_state(loaded: dict[Any, Any]) -> bool:
    return bool(loaded) and all(isinstance(name, str) and isinstance(value, Tensor) for name, value in loaded.items())


def first_line(problem: Exception) -> str:
    """What an exception says, cut to fit into a sentence."""
    return (str(problem).strip().splitlines() or [type(problem).__name__])[0][:120]
