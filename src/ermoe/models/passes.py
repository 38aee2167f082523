"""Forward passes in evaluation mode: over whatever a data loader yields, and over shapes without data.

The latter take the path that is the same for all tokens: every expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ermoe.errors import UserError
from ermoe.models.backbones import call, family_of
from ermoe.nn import moe_layers
from ermoe.nn.sharding import without_fsdp

# Where models keep the tensor that is their answer, in the order in which it is looked for.
_ANSWERS = ("logits", "image_embeds", "image_features", "last_hidden_state", "reconstruction", "feature_maps")


@torch.no_grad()
def run(model: nn.Module, batches: Iterable[Any], hooks: Mapping[nn.Module, Callable[..., None]]) -> None:
    """Runs the model in evaluation mode over batches, of which there must be some; see `outputs`.

    A hook is given its module, the arguments, the keyword arguments and the output of each of its calls.
    """
    with evaluating(model), ExitStack() as hooked:
        for module, hook in hooks.items():
            hooked.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
        for _ in outputs(model, batches):
            pass


def outputs(model: nn.Module, batches: Iterable[Any]) -> Iterator[Any]:
    """What the model says to each of the batches, of which there must be some.

    A batch is a tensor of images, a list or tuple that starts with one, or a mapping of keyword arguments.
    """
    refuse_tensor(batches)
    eye = Eye(model)
    device = next(model.parameters()).device
    count = 0
    for batch in batches:
        if isinstance(batch, Mapping):
            yield eye({name: _finite(value).to(device) for name, value in batch.items()})
        else:
            yield eye(_finite(images_of(batch)).to(device))
        count += 1
    if count == 0:
        raise UserError("there are no batches to calibrate on: pass a list or a data loader, not an exhausted iterator")


class Eye(nn.Module):
    """A model that is shown batches as its family takes them: images alone, or keyword arguments by name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        try:
            self.see = family_of(model).see
        except UserError:  # a module of somebody's own, with layers of experts in it
            self.see = call

    def forward(self, batch: Tensor | dict[str, Tensor]) -> Any:
        return self.see(self.model, batch)


def answer(output: Any) -> Tensor:
    """The one tensor that is a model's answer: logits if there are any, else what it made of the images."""
    if isinstance(output, Mapping):
        output = next((output[name] for name in _ANSWERS if output.get(name) is not None), None)
    if isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, Tensor):
        raise UserError(
            f"the model says a {type(output).__name__}: need a tensor, a tuple that starts with one, or a mapping with "
            f"{', '.join(_ANSWERS[:-1])} or {_ANSWERS[-1]}"
        )
    return output


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Within it the model is in evaluation mode; afterwards each of its modules is in its own mode again."""
    before = {module: module.training for module in model.modules()}
    try:
        model.eval()
        yield
    finally:
        for module, training in before.items():
            module.training = training


def refuse_tensor(batches: object) -> None:
    """A tensor is one batch, and going through it would yield single images."""
    if isinstance(batches, Tensor):
        raise UserError(f"batches is one tensor of shape {tuple(batches.shape)}: pass a list of batches, [images]")


def _finite(inputs: Tensor) -> Tensor:
    if not bool(inputs.isfinite().all()):
        raise UserError("a batch holds NaN or infinity: look for broken images or for a division by zero before it")
    return inputs


def images_of(batch: Any) -> Tensor:
    """The images of a batch: itself, its first part, or what it calls ``image``."""
    images = batch[0] if isinstance(batch, (tuple, list)) and batch else getattr(batch, "image", batch)
    if not isinstance(images, Tensor):
        raise UserError(
            f"a batch is a {type(batch).__name__}: need a tensor of images, a tuple that starts with one, or a mapping "
            "of the model's keyword arguments"
        )
    return images


def tensors_of(batch: Any) -> list[Tensor]:
    """What a model is shown of a batch: its images, or the values of its keyword arguments; each has a row an image."""
    return list(batch.values()) if isinstance(batch, Mapping) else [images_of(batch)]


def input_shape(model: nn.Module, image_size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    """Channels, height and width (and depth) of the images a model takes, at its own size or at another one."""
    family = family_of(model)
    own, channels = family.image_size(model), family.channels(model)
    if image_size is None and not own:
        raise UserError(f"this {type(model).__name__} takes images of any size: choose one with image_size=")
    if image_size is None:
        return (channels, *own)
    axes = len(own) or next((len(m.kernel_size) for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), 2)
    size = tuple(image_size) if isinstance(image_size, (tuple, list)) else (image_size,) * axes
    if len(size) != axes or not all(isinstance(edge, int) and edge > 0 for edge in size):
        raise UserError(f"image_size={image_size!r}: need a positive whole number, or a tuple of {axes}")
    shape = (channels, *size)
    if own and size != own:
        _try(model, shape)
    return shape


def _try(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Refuses what the backbone refuses, in its own words: some sizes, or all but its own."""
    try:
        run_without_data(model, (1, *shape))
    except UserError:
        raise
    except (AssertionError, RuntimeError, ValueError) as problem:
        reason = str(problem).partition("\n")[0].rstrip(".")
        name = type(model).__name__
        raise UserError(f"image_size={shape[1:]}: this {name} does not take such images ({reason})") from problem


@torch.no_grad()
def run_without_data(model: nn.Module, shape: tuple[int, ...]) -> None:
    """A forward pass along the static path over tensors that have a shape and no data; the model stays as it is."""
    eye = Eye(model)
    # Tensors of each module once: one that has two names would not get its own back, if torch looked for ties.
    weightless = {
        f"{path}.{name}": torch.empty(t.shape, dtype=t.dtype, device="meta")
        for path, module in eye.named_modules()
        for name, t in (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
    }
    images = torch.empty(shape, device="meta", dtype=next(model.parameters()).dtype)
    with evaluating(model), every_expert(model), without_fsdp(model):
        functional_call(eye, weightless, (images,), tie_weights=False)


@contextmanager
def every_expert(model: nn.Module) -> Iterator[None]:
    """Within it, all experts run on all tokens: E / K times the work, the same numbers, static shapes."""
    before = {layer: layer.every_expert for layer in moe_layers(model).values()}
    try:
        for layer in before:
            layer.every_expert = True
        yield
    finally:
        for layer, value in before.items():
            layer.every_expert = value
