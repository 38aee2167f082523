"""Saving and loading models: a folder with ``config.json`` and ``model.safetensors``."""

from __future__ import annotations

import json
import logging
import os
import uuid
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from ermoe import cpu
from ermoe._version import __version__
from ermoe.errors import UserError
from ermoe.files import replacing
from ermoe.models.weights.checkpoints import first_line, read_checkpoint
from ermoe.models.weights.rebuild import describe, is_registered, rebuild
from ermoe.models.weights.state import load_state
from ermoe.plain import Json

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def save(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Writes a model, sparse or dense, into a folder, from which `ermoe.load` and timm's ``local-dir:`` build it again.

    Both files are written whole before either replaces its predecessor, so a save that fails in writing leaves the
    earlier model. Each carries the mark of its save: a process that ends between the two replacements leaves new
    weights beside an old configuration, which `load` refuses.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder")
    config = _config(model)
    text = json.dumps(config, indent=2, default=_refuse)
    with replacing(folder / CONFIG) as config_draft, replacing(folder / WEIGHTS) as weights_draft:
        save_file(_own_memory(model.state_dict()), weights_draft, metadata={"format": "pt", "save": config["save"]})
        config_draft.write_text(text + "\n", encoding="utf-8")


def load(source: str | os.PathLike[str], *, device: torch.device | str = "cpu") -> nn.Module:
    """The model that `save` wrote, from a folder or from a repository of the Hugging Face hub ("owner/name")."""
    folder = _folder(source)
    config = _read_config(folder / CONFIG)
    _check_same_save(folder, config)
    model = _rebuild(config, folder / CONFIG)
    load_state(model, read_checkpoint(folder / WEIGHTS), source=folder / WEIGHTS)
    model = model.to(device)
    _warn_of_cpu(model, folder)
    return model


def _warn_of_cpu(model: nn.Module, folder: Path) -> None:
    """A model in half precision may end Python where it is first used: on some CPUs."""
    weight = next(model.parameters())
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    if is_half and weight.device.type == "cpu" and (problem := cpu.problem()):
        logging.getLogger("ermoe").warning("%s holds weights in %s: %s", folder, weight.dtype, problem)


def weightless(source: str | os.PathLike[str]) -> nn.Module:
    """The model that `save` wrote, on the meta device: its shape without its weights."""
    folder = _folder(source)
    return _rebuild(_read_config(folder / CONFIG), folder / CONFIG, device="meta")


def _config(model: Any) -> Json:
    """What `ermoe.load` needs, beside what timm needs for ``local-dir:``."""
    description = describe(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = {"ermoe_version": __version__, "save": uuid.uuid4().hex, "dtype": dtype, "ermoe": description}
    if not description["family"].startswith("timm"):
        return config
    dense = description["dense"]
    if description["sparsity"] is None or (is_registered(dense) and not description["merged"]):
        model_args = {**dense["args"], **(description["sparsity"] or {})}
        entry = {"architecture": dense["architecture"], "model_args": model_args}
    else:
        entry = {"architecture": "ermoe_upcycled", "model_args": {"description": description}}
    return {
        **entry,
        "num_classes": model.num_classes,
        "num_features": model.num_features,
        "global_pool": model.global_pool,
        "pretrained_cfg": _pretrained_cfg(model),
        **config,
    }


def _pretrained_cfg(model: Any) -> Json:
    """How images are to be prepared, without the address of weights that are no longer these."""
    kept = ("input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std", "pool_size")
    patches = model.patch_embed
    known = {**model.pretrained_cfg, "num_classes": model.num_classes}
    known["input_size"] = (patches.proj.in_channels, *patches.img_size)
    return {name: known[name] for name in (*kept, "num_classes", "first_conv", "classifier") if name in known}


def _refuse(value: Any) -> None:
    raise UserError(f"{value!r} cannot be written to {CONFIG}: build the model with options that are plain values")


def _own_memory(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous tensors, none of which is a view of another: the format has no notion of shared memory."""
    seen: set[int] = set()
    own = {}
    for name, tensor in state.items():
        tensor = tensor.detach().contiguous()
        own[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    return own


def _folder(source: str | os.PathLike[str]) -> Path:
    folder = Path(source)
    if folder.is_dir():
        return folder
    if str(source).count("/") != 1 or folder.is_absolute() or str(source).startswith("."):
        raise UserError(f"{source} is no folder: name one that ermoe.save wrote, or a hub repository as owner/name")
    return _from_hub(str(source))


def _from_hub(source: str) -> Path:
    from huggingface_hub import snapshot_download  # a second, which folders need not wait for
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = source.partition("@")
    try:
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=[CONFIG, WEIGHTS]))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        raise UserError(
            f"{source} is neither a folder here nor a repository that the hub would give ({type(problem).__name__})"
        ) from problem


def _read_config(path: Path) -> Json:
    try:
        config: Json = json.loads(path.read_text(encoding="utf-8"))
        if not {"family", "dense", "sparsity", "merged"} <= config["ermoe"].keys():
            raise KeyError("ermoe")
    except FileNotFoundError:
        raise UserError(f"{path} is missing: name a folder that ermoe.save wrote") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged or was not written by ermoe.save: save the model again") from None
    return config


def _rebuild(config: Json, path: Path, *, device: str = "cpu") -> nn.Module:
    try:
        return rebuild(config["ermoe"], device=device).to(_precision(config["dtype"]))
    except UserError:
        raise
    except Exception as problem:  # whatever another library makes of arguments that it did not expect
        raise UserError(f"{path} describes a model that cannot be built ({first_line(problem)})") from problem


def _precision(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise UserError(f"{CONFIG} gives weights the type {name!r}: write float32, float16 or bfloat16")
    return dtype


def _check_same_save(folder: Path, config: Json) -> None:
    """A save that was interrupted between its two files left weights that do not belong to the configuration."""
    try:
        with safe_open(folder / WEIGHTS, framework="pt") as weights:
            written = (weights.metadata() or {}).get("save")
    except (SafetensorError, OSError):
        return  # reading the weights themselves will say what is wrong with them
    if written is not None and "save" in config and written != config["save"]:
        raise UserError(f"{folder}: {CONFIG} and {WEIGHTS} come from two different saves; save the model again")
