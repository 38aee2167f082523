"""Saving and loading models: a folder with ``config.json`` and ``model.safetensors``, or weights in any usual format.

A model is written down as plain data and built again from it; then named tensors are put into it, and what does not fit
is said exactly. Nothing is ever unpickled.
"""

from __future__ import annotations

import copy
import json
import logging
import uuid
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn

from ermoe import _auto_classes, cpu
from ermoe._moved import renamed
from ermoe._version import __version__
from ermoe.errors import UserError
from ermoe.files import (
    LARGEST_JSON,
    Json,
    StrPath,
    is_plain_name,
    naming_what_cannot_be_read,
    printable,
    read_object,
    read_text,
    replacing,
)
from ermoe.models.backbones import Family, family_name, family_named, family_of
from ermoe.models.merge import merge
from ermoe.models.obstacles import refuse_adapters
from ermoe.models.upcycle import Options, upcycle
from ermoe.models.weights.compare import difference
from ermoe.models.weights.stored import check_numbers, declared, first_line, no_larger_than, read_checkpoint
from ermoe.nn import Balance
from ermoe.nn.routers import OneWayRouter
from ermoe.nn.sharding import is_sharded, whole, without_fsdp

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
_LARGEST_FILE = 5 * 10**9
_PRECISIONS = ("float32", "float16", "bfloat16", "float64")
_LISTED = 6
_CHECKS_ITSELF = "_extra_state"  # torch's name for what a module reads with a method of its own


class Description(TypedDict):
    """A model as plain data: its family, its dense form, and the options that made it sparse (None if it is dense)."""

    family: str
    dense: Json
    sparsity: Options | None
    merged: bool


def save(model: nn.Module, folder: StrPath, *, args: Options | None = None) -> None:
    """Writes a model, sparse or dense, into a folder, from which `ermoe.load` and timm's ``local-dir:`` build it again.

    The arguments with which timm created a model are read off it. ``args`` are those that cannot be: `ermoe.upcycle`
    warns where that is so. Weights of more than 5 GB come in several files with an index, as Hugging Face has them. A
    model whose experts are on several processes is saved by all of them together.

    All files are written whole before any replaces its predecessor, so a save that fails in writing leaves the
    earlier model. Each carries the mark of its save: a process that ends between two replacements leaves new
    weights beside an old configuration, which `load` refuses.
    """
    save_state(model, model.state_dict(), folder, args=args)


def save_state(
    model: nn.Module,
    state: Mapping[str, Tensor],
    folder: StrPath,
    *,
    args: Options | None = None,
    largest_file: int = _LARGEST_FILE,
) -> None:
    """`save` with weights that the model itself need not hold; see `weightless_copy`.

    Of sharded weights, the first process puts together and writes one file after the other, so that it never holds
    more than ``largest_file`` bytes of them; every process must call.
    """
    folder = Path(folder)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: name a folder")
    with without_fsdp(model):  # whose modules have classes of their own
        config = _config(model, args)
    text = json.dumps(config, indent=2, default=_refuse)
    files = _split(state, largest_file)
    is_shared = any(map(is_sharded, state.values()))
    if not is_shared or dist.get_rank() == 0:
        with ExitStack() as drafts:
            drafts.enter_context(replacing(folder / CONFIG)).write_text(text + "\n", encoding="utf-8")
            if len(files) > 1:
                drafts.enter_context(replacing(folder / INDEX)).write_text(_index(state, files), encoding="utf-8")
            for file, names in files.items():
                own = _own_memory({name: whole(state[name]).cpu() for name in names})
                draft = drafts.enter_context(replacing(folder / file))
                save_file(own, draft, metadata={"format": "pt", "save": config["save"]})
        _remove_others(folder, files)
    else:
        for names in files.values():
            for name in names:
                whole(state[name])
    if is_shared:
        dist.barrier()


def _split(state: Mapping[str, Tensor], largest_file: int) -> dict[str, list[str]]:
    """Names of tensors by the file they go to: one, or several of which none is larger than it must be."""
    parts: list[list[str]] = [[]]
    size = 0
    for name, tensor in state.items():
        own = tensor.numel() * tensor.element_size()
        if parts[-1] and size + own > largest_file:
            parts.append([])
            size = 0
        parts[-1].append(name)
        size += own
    if len(parts) == 1:
        return {WEIGHTS: parts[0]}
    return {f"model-{number:05d}-of-{len(parts):05d}.safetensors": names for number, names in enumerate(parts, 1)}


def _index(state: Mapping[str, Tensor], files: dict[str, list[str]]) -> str:
    total = sum(tensor.numel() * tensor.element_size() for tensor in state.values())
    places = {name: file for file, names in files.items() for name in names}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def _remove_others(folder: Path, files: Iterable[str]) -> None:
    """Weights of an earlier model that came in another number of files."""
    kept = {*files, *([INDEX] if WEIGHTS not in files else [])}
    for path in (folder / WEIGHTS, folder / INDEX, *folder.glob("model-*-of-*.safetensors")):
        if path.name not in kept:
            path.unlink(missing_ok=True)


def weights_in(folder: Path) -> list[Path]:
    """The files with the weights of a model folder: those that its index names, or the only one."""
    if not (folder / INDEX).is_file():
        return [folder / WEIGHTS]
    places = read_object(folder / INDEX, "save the model again").get("weight_map")
    names = list(places.values()) if isinstance(places, dict) else []
    if not names or not all(is_plain_name(name) and str(name).endswith(".safetensors") for name in names):
        raise UserError(f"{folder / INDEX} names no files with weights: save the model again")
    return [folder / name for name in sorted(set(names))]


def weightless_copy(model: nn.Module) -> nn.Module:
    """A copy on the meta device of all that is saved: what `save_state` needs to know of a model."""
    saved = {id(tensor): tensor for tensor in (*model.parameters(), *model.state_dict(keep_vars=True).values())}
    return copy.deepcopy(model, {own: _without_data(tensor) for own, tensor in saved.items()})


def _without_data(tensor: Tensor) -> Tensor:
    empty = tensor.detach().to("meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


@renamed(source="model")
def load(model: StrPath, *, device: torch.device | str = "cpu") -> nn.Module:
    """The model that `save` wrote, from a folder or from a repository of the Hugging Face hub ("owner/name").

    Also sparse models of transformers that ``save_pretrained`` or the Trainer wrote.

    Before anything is built or read, what the configuration asks for is compared with what the weights' header has.
    """
    folder = _folder(model)
    config, _ = _planned(folder)
    loaded = _rebuild(config, folder / CONFIG)
    for file in weights_in(folder):  # all of them together are what the model needs: `_planned` has compared
        load_state(loaded, read_checkpoint(file), path=file, strict=False)
    loaded = loaded.to(device)
    _warn_of_cpu(loaded, folder)
    return loaded


def _warn_of_cpu(model: nn.Module, folder: Path) -> None:
    """A model in half precision may end Python where it is first used: on some CPUs."""
    weight = next(model.parameters())
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    if is_half and weight.device.type == "cpu" and (problem := cpu.problem()):
        logging.getLogger("ermoe").warning("%s holds weights in %s: %s", folder, weight.dtype, problem)


def weightless(model: StrPath) -> nn.Module:
    """The model that `save` wrote, on the meta device: its shape without its weights, which need not be there."""
    return _planned(_folder(model), needs_weights=False)[1]


def _planned(folder: Path, *, needs_weights: bool = True) -> tuple[Json, nn.Module]:
    """The configuration and, on the meta device, the model that it describes, which the weights fit."""
    config_file, files = folder / CONFIG, weights_in(folder)
    config = _read_config(config_file)
    is_complete = needs_weights or files[0].exists()
    weights: dict[str, Tensor] = {}
    for file in files if is_complete else ():
        tensors, notes = declared(file)
        if "save" in notes and "save" in config and notes["save"] != config["save"]:
            # A save that was interrupted between two files left weights that do not belong to the configuration.
            raise UserError(f"{folder}: {CONFIG} and {file.name} come from two different saves; save the model again")
        weights |= tensors
    check_numbers(config["ermoe"], weights, config_file)
    with no_larger_than(weights, config_file):
        model = _rebuild(config, config_file, device="meta")
    if is_complete:
        _fitting(model, weights, path=folder if len(files) > 1 else files[0])
    return config, model


def _config(model: Any, args: Options | None) -> Json:
    """What `ermoe.load` needs, beside what timm needs for ``local-dir:``."""
    description = describe(model, args)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = {"ermoe_version": __version__, "save": uuid.uuid4().hex, "dtype": dtype, "ermoe": description}
    if description["family"].startswith("hugging_face") and description["sparsity"] is not None:
        from ermoe.models.hugging_face import config_json  # seconds, which models of other families need not wait for

        return {**config, **config_json(model), "dtype": dtype}
    if not description["family"].startswith("timm"):
        return config
    dense = description["dense"]
    is_timms = description["sparsity"] is None or (is_registered(dense) and not description["merged"])
    if (
        is_timms
        and "features_only" not in dense["args"]
        and not any(isinstance(v, dict) for v in dense["args"].values())
    ):
        model_args = {**dense["args"], **(description["sparsity"] or {})}
        entry = {"architecture": dense["architecture"], "model_args": model_args}
    else:
        entry = {"architecture": "ermoe_upcycled", "model_args": {"description": description}}
    backbone: Any = family_of(model).backbone(model)
    shown = {name: getattr(backbone, name) for name in ("num_classes", "num_features", "global_pool")}
    shown["num_classes"] = dense["args"].get("num_classes", backbone.num_classes)  # a replaced head's own
    image = {**_pretrained_cfg(model, backbone), "num_classes": shown["num_classes"]}
    return {**entry, **shown, "pretrained_cfg": image, **config}


def _pretrained_cfg(model: nn.Module, backbone: Any) -> Json:
    """How images are to be prepared, without the address of weights that are no longer these."""
    kept = ("input_size", "fixed_input_size", "interpolation", "crop_pct", "crop_mode", "mean", "std", "pool_size")
    family = family_of(model)
    known = dict(backbone.pretrained_cfg)
    known["input_size"] = (family.channels(model), *family.image_size(model))
    return {name: known[name] for name in (*kept, "first_conv", "classifier") if name in known}


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


def _folder(model: StrPath) -> Path:
    folder = Path(model)
    with naming_what_cannot_be_read():
        if folder.is_dir():
            return folder
    if str(model).count("/") != 1 or folder.is_absolute() or str(model).startswith("."):
        raise UserError(
            f"{printable(model)} is no folder: name one that ermoe.save wrote, or a hub repository as owner/name"
        )
    return _from_hub(str(model))


def _from_hub(repository: str) -> Path:
    from huggingface_hub import snapshot_download  # a second, which folders need not wait for
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    name, _, revision = repository.partition("@")
    try:
        wanted = [CONFIG, INDEX, "model*.safetensors"]
        return Path(snapshot_download(name, revision=revision or None, allow_patterns=wanted))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as problem:
        raise UserError(
            f"{repository} is neither a folder here nor a repository that the hub would give ({type(problem).__name__})"
        ) from problem


def _read_config(path: Path) -> Json:
    if not path.exists():
        raise UserError(f"{path} is missing: name a folder that ermoe.save wrote")
    text = read_text(path, "save the model again", limit=LARGEST_JSON)
    try:
        config: Json = json.loads(text)
        if str(config.get("model_type", "")).startswith(_auto_classes.PREFIX):
            config["ermoe"] = _from_transformers(config)
        if not {"family", "dense", "sparsity", "merged"} <= config["ermoe"].keys() or "dtype" not in config:
            raise KeyError("ermoe")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        raise UserError(f"{path} is damaged or was not written by ermoe.save: save the model again") from None
    return config


def _from_transformers(config: Json) -> Description:
    """What transformers' configuration of a sparse model says, in the words of `describe`."""
    dense = {name: value for name, value in config.items() if name not in ("ermoe", "save", "ermoe_version")}
    dense["model_type"] = config["model_type"].removeprefix(_auto_classes.PREFIX)
    for part in (dense, dense.get("vision_config", {})):
        part.pop(_auto_classes.NOTICE, None)
    name = config["architectures"][0].removeprefix(_auto_classes.NAME)
    return {
        "family": "hugging_face_timm" if dense["model_type"] == "timm_wrapper" else "hugging_face_vit",
        "dense": {"class": name, "config": dense, "options": config["ermoe"].get("options", {})},
        "sparsity": config["ermoe"]["sparsity"],
        "merged": config["ermoe"]["merged"],
    }


def _rebuild(config: Json, path: Path, *, device: str = "cpu") -> nn.Module:
    try:
        return rebuild(config["ermoe"], device=device).to(_precision(config["dtype"]))
    except UserError:
        raise
    except Exception as problem:  # whatever another library makes of arguments that it did not expect
        raise UserError(f"{path} describes a model that cannot be built ({first_line(problem)})") from problem


def _precision(name: str) -> torch.dtype:
    if name not in _PRECISIONS:
        raise UserError(f"{CONFIG} gives weights the type {name!r}: write float32, float16 or bfloat16")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def describe(model: nn.Module, args: Options | None = None) -> Description:
    """The backbone's family, its dense form, and the options that made it sparse (None if it is dense).

    ``args`` are arguments of timm that cannot be read off the model.

    What is written is built at once, and compared: what a description cannot say is an error now, not a wrong model
    when it is loaded.
    """
    refuse_adapters(model)
    family = family_of(model)
    sparsity = getattr(family.backbone(model), "sparsity", None)
    description: Description = {
        "dense": _dense(family, model, args),
        "family": family_name(model),
        "sparsity": None if sparsity is None else sparsity.as_options(),
        "merged": sparsity is not None and sparsity.merged,
    }
    try:
        rebuilt = rebuild(description, device="meta").to(next(model.parameters()).dtype)
    except UserError:
        raise
    except Exception as problem:  # whatever another library makes of arguments that were read wrongly
        lost: str | None = f"it is not built again ({first_line(problem)})"
    else:
        lost = difference(model, rebuilt)
    if lost is not None:
        raise UserError(
            f"this {type(model).__name__} cannot be written down: {lost}; if timm.create_model was given more than its "
            "name, pass that as args={…}; otherwise create it by its library's own functions, make it sparse with "
            "ermoe.upcycle, and change only arguments of these"
        )
    return description


def _dense(family: Family, model: nn.Module, args: Options | None) -> Json:
    if args is None:
        return family.describe(model)
    if not family_name(model).startswith("timm"):
        raise UserError(f"args= are arguments of timm.create_model: a {type(model).__name__} needs none")
    from ermoe.models.families import timm_architecture  # seconds, which models of other families need not wait for

    return timm_architecture.describe(model, args)


def rebuild(description: Description, *, device: str = "cpu", init: str = "empty") -> nn.Module:
    """The model a description means: freshly initialised (``init="random"``), or about to be given its weights."""
    dense, sparsity = description["dense"], description["sparsity"]
    family = family_named(description["family"])
    if sparsity is None:
        return family.build(dense, device=device)
    if is_registered(dense):
        dense = {**dense, "args": {**dense["args"], **sparsity}}
        model = family.build(dense, device="meta" if init == "empty" else device)
        if init == "empty" and device != "meta":
            model.to_empty(device=device)
            for module in model.modules():
                if isinstance(module, Balance):
                    module.reset_parameters()
    else:
        model = upcycle(family.build(dense, device=device), init=init, inplace=True, is_new=True, **sparsity)
    return merge(model, inplace=True) if description["merged"] else model


def is_registered(dense: Json) -> bool:
    """Whether timm itself creates the sparse model by its name."""
    if "ermoe" not in dense.get("architecture", ""):
        return False
    import timm  # seconds, which models of other families need not wait for

    return timm.is_model(dense["architecture"])


@dataclass(frozen=True, slots=True)
class Fit:
    """How weights fitted a model: names the file lacked, names it had in excess, and what was resized to fit."""

    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    resized: tuple[str, ...] = ()


def load_state(
    model: nn.Module,
    state: dict[str, Tensor],
    *,
    path: StrPath,
    strict: bool = True,
    resized: tuple[str, ...] = (),
) -> Fit:
    """Copies ``state`` into ``model``. Unless ``strict`` is off, a name, shape or type that does not fit is an error.

    A tensor of the wrong shape counts as missing and unexpected at once, and so does one of a type that would lose
    or invent something, like complex or whole numbers for real ones. Weights that are not numbers, the end of a run
    that diverged, are refused always.
    """
    fitting, fit = _fitting(model, state, path=path, strict=strict, resized=resized)
    own = model.state_dict()
    if broken := [name for name, tensor in fitting.items() if not _has_numbers(tensor, own[name], name)]:
        raise UserError(
            f"{path} holds values that are not numbers: {_listed(broken)}; its training diverged, or the file is "
            "damaged: use an earlier checkpoint, or copy it again"
        )
    try:
        model.load_state_dict(fitting, strict=False)
    except (RuntimeError, TypeError, ValueError) as problem:
        raise UserError(f"{path} does not fit this {type(model).__name__}: {first_line(problem)}") from problem
    return fit


def _fitting(
    model: nn.Module,
    state: Mapping[str, Tensor],
    *,
    path: StrPath,
    strict: bool = True,
    resized: tuple[str, ...] = (),
) -> tuple[dict[str, Tensor], Fit]:
    """The tensors of ``state`` that ``model`` has room for, and how all of them fit; values are not looked at."""
    # What routers of single experts kept when they computed something is not missed.
    idle = tuple(f"{name}." for name, module in model.named_modules() if isinstance(module, OneWayRouter))
    state = {name: tensor for name, tensor in state.items() if not name.startswith(idle)}
    wanted = model.state_dict()
    shared = {name: state[name] for name in wanted if name in state and not name.endswith(_CHECKS_ITSELF)}
    shapes = {
        name: f"{name} {tuple(tensor.shape)} instead of {tuple(wanted[name].shape)}"
        for name, tensor in shared.items()
        if tensor.shape != wanted[name].shape
    }
    types = {
        name: f"{name} {tensor.dtype} instead of {wanted[name].dtype}"
        for name, tensor in shared.items()
        if name not in shapes and not _is_castable(tensor.dtype, wanted[name].dtype)
    }
    wrong = shapes.keys() | types.keys()
    fit = Fit(
        missing=tuple(sorted(wanted.keys() - state.keys() | wrong)),
        unexpected=tuple(sorted(state.keys() - wanted.keys() | wrong)),
        resized=resized,
    )
    if strict and (fit.missing or fit.unexpected):
        raise UserError(f"{path} does not fit this {type(model).__name__}: {_explain(fit, shapes, types)}")
    return {name: tensor for name, tensor in state.items() if name in wanted and name not in wrong}, fit


def _is_castable(stored: torch.dtype, wanted: torch.dtype) -> bool:
    """Whether nothing is lost and nothing invented: whole numbers for real ones are weights of something else."""
    return torch.can_cast(stored, wanted) and stored.is_floating_point == wanted.is_floating_point


def _has_numbers(tensor: Tensor, own: Tensor, name: str) -> bool:
    """Whether no value is NaN, and none infinite in the model's precision.

    Only what a module reads with a method of its own may be, and buffers that are in a new model, like masks of −∞.
    """
    if not tensor.is_floating_point():
        return True
    if name.endswith(_CHECKS_ITSELF):
        return not bool(tensor.isnan().any())
    tensor = tensor.to(own.dtype)
    return bool(tensor.isfinite().all()) or bool(not tensor.isnan().any() and not own.isfinite().all())


def _explain(fit: Fit, shapes: dict[str, str], types: dict[str, str]) -> str:
    parts = []
    for what, wrong in (("shape", shapes), ("type", types)):
        if wrong:
            parts.append(f"wrong {what} {_listed(list(wrong.values()))}")
    for what, names in (("missing", fit.missing), ("unexpected", fit.unexpected), ("resized", fit.resized)):
        names = tuple(name for name in names if name not in shapes and name not in types)
        if names:
            parts.append(f"{what} {_listed(names)}")
    return "; ".join(parts)


def _listed(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return ", ".join(map(printable, names[:_LISTED])) + more
