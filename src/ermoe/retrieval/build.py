"""CLIPs to work with: built by a recipe, or read from where a run left them."""

from __future__ import annotations

from pathlib import Path

import torch

from ermoe.errors import UserError
from ermoe.files import StrPath, read_json
from ermoe.models.io import CONFIG, load
from ermoe.models.upcycle import restart_ffns, upcycle
from ermoe.models.weights.foreign import load_weights
from ermoe.retrieval.clip.model import CLIP, UNKNOWN_PRETRAINING, create_clip
from ermoe.retrieval.clip.weights import load_clip_weights
from ermoe.retrieval.presets import RetrievalRecipe
from ermoe.retrieval.rivals import clip_moe, long_clip
from ermoe.train.run_folder import model_folder


def build(recipe: RetrievalRecipe) -> CLIP:
    """The model of a recipe before training; its random numbers are a function of the seed."""
    seed = recipe.training.seed
    model = create_clip(
        recipe.architecture, recipe.text, embed_dim=recipe.embed_dim, image_args=recipe.image_args, seed=seed
    )
    if recipe.init == "same" and recipe.weights is None:
        restart_ffns(model, torch.Generator().manual_seed(seed))
    _start_towers(model, recipe)
    generator = torch.Generator().manual_seed(seed)
    if recipe.variant == "long-clip":
        long_clip.stretch_positions(model)
    if recipe.variant == "clip-moe":
        model = clip_moe.clip_moe(model, generator=generator)
        clip_moe.train_only_gates(model)
    elif recipe.sparsity is not None:
        init = "dense" if recipe.weights or recipe.image_weights else recipe.init
        upcycle(model, init=init, inplace=True, is_new=init != "dense", generator=generator, **recipe.sparsity)
    if recipe.text_tower == "frozen":
        model.freeze_text()
    return model


def _start_towers(model: CLIP, recipe: RetrievalRecipe) -> None:
    clip_file, image_file = _files(recipe)
    if clip_file is not None:
        parts = ("image", "text") if image_file is None else ("text",)
        load_clip_weights(model, clip_file, parts=parts)
    if image_file is not None:
        _load_image_tower(model, image_file)
    if recipe.text_from is not None:
        _take_text_tower(model, recipe.text_from)
    if recipe.text_tower == "frozen" and clip_file is None and recipe.text_from is None:
        raise UserError("a frozen text tower must know something: give --weights of a CLIP, or --text-from a run")


def _files(recipe: RetrievalRecipe) -> tuple[str | None, str | None]:
    """The file of a CLIP and that of a ViT for the image tower, as far as they are given."""
    if recipe.weights_of == "clip":
        return recipe.weights, recipe.image_weights
    if recipe.image_weights is not None:
        raise UserError(f"{recipe.preset} has one file, for its image tower: give it with --weights")
    return None, recipe.weights


def _load_image_tower(model: CLIP, path: str) -> None:
    fit = load_weights(model.visual.trunk, path, strict=False)
    model.remember([UNKNOWN_PRETRAINING])
    if fit.missing:
        raise UserError(
            f"{path} lacks {fit.missing[0]} ({len(fit.missing)} such): it holds weights of another image tower"
        )


def _take_text_tower(model: CLIP, folder: str) -> None:
    other = load(model_folder(folder, prefer="best"))
    if not isinstance(other, CLIP) or other.text.shape != model.text.shape or other.embed_dim != model.embed_dim:
        raise UserError(f"{folder} has no text tower of this shape: name a run of the same preset family")
    model.text.load_state_dict(other.text.state_dict())
    with torch.no_grad():
        model.logit_scale.copy_(other.logit_scale)
    model.trained_on = other.trained_on.clone()  # what its text tower has seen counts


def load_clip(model: StrPath, *, device: torch.device | str = "cpu") -> CLIP:
    """The CLIP of a run folder (the epoch that dev chose), a model folder or a hub repository, in evaluation mode."""
    found = load(model_folder(model, prefer="best"), device=device)
    if not isinstance(found, CLIP):
        raise UserError(f"{model} holds a {type(found).__name__}, not a CLIP: name a run of ermoe retrieve train")
    return found.eval()


def save_id(model: StrPath) -> str | None:
    """Which save of a model lies there, so that one that was trained further is told apart; None on the hub."""
    path = Path(model_folder(model, prefer="best")) / CONFIG
    if not path.is_file():
        return None
    remedy = "copy the model again, or train it anew"
    content = read_json(path, remedy)
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: {remedy}")
    return content.get("save")
