"""A sparse model learns to answer as its dense teacher does, from images without labels: layer by layer, then whole.

Layer by layer, every mixture learns to give the outputs of the dense network it stands for, on the tokens it really
meets: the model runs, no gradient leaves a layer, and all layers learn at once. Positions and directions weigh what
they mean for the answer (`ermoe.models.tokens`). As a whole, the model learns the teacher's answers,
KL(teacher ‖ model) of the class probabilities, and what the teacher's blocks say on the way: an image has one answer
and hundreds of tokens, so that from few images a model learns more by these, and less by heart.

Letters: B images, C classes, N tokens of an image, D model width.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ermoe.data.order import hashed
from ermoe.errors import UserError
from ermoe.files import Json, StrPath
from ermoe.models.backbones import SparseBlock, family_of
from ermoe.models.calibrate import settle_offsets
from ermoe.models.digest import digest
from ermoe.models.freeze import freeze
from ermoe.models.passes import Eye, answer, evaluating, images_of, refuse_tensor, tensors_of
from ermoe.models.tokens import Networks, metric_of, tokens_and_gradients, weights_of
from ermoe.nn import MixtureLayer, moe_layers
from ermoe.nn.ffn import FFN
from ermoe.train.compute import Compute
from ermoe.train.loader import Loader
from ermoe.train.loop import Task, fit
from ermoe.train.settings import Training

_BATCHES_TO_SETTLE = 16
_BATCHES_TO_WEIGH = 8


@dataclass(frozen=True, slots=True)
class Distillation:
    """How long and how fast a model learns from its teacher. The rates suit fitted experts and some thousand images.

    Args:
        layer_epochs: passes over the batches in which every layer learns its dense network's outputs; 0 for none.
        epochs: passes in which the whole model learns its teacher's answers; 0 for none.
        layer_lr: highest learning rate of the first part; half a cosine leads back to zero.
        lr: highest learning rate of the second part.
        state_weight: in the second part, of the mean over blocks of ‖h − h_teacher‖² / ‖h_teacher‖², their outputs,
            beside the answers.
        save_every: steps between two checkpoints, if there is a folder to go on from.
        seed: of the order of batches.
    """

    layer_epochs: int = 0
    epochs: int = 5
    layer_lr: float = 1e-4
    lr: float = 1.5e-5
    state_weight: float = 3.0
    save_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("layer_epochs", "epochs", "state_weight", "save_every"):
            if getattr(self, name) < 0:
                raise UserError(f"{name}={getattr(self, name)}: need 0 or more")

    def training(self, epochs: int, lr: float, batch_size: int) -> Training:
        """The numbers of the loop: plain AdamW without decay, bases retracted at the end of every epoch."""
        return Training(
            epochs=epochs,
            batch_size=batch_size,
            base_lr=lr * 256 / batch_size,  # which is the rate of 256 samples
            weight_decay=0.0,
            warmup_epochs=min(0.5, epochs / 10),
            ema=0.0,
            save_every=self.save_every,
            evaluate_every=max(1, epochs),
            log_every=10,
            seed=self.seed,
        )


def distill(
    model: nn.Module,
    teacher: nn.Module,
    batches: Iterable[Any] | Loader[Any],
    *,
    calibration: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    folder: StrPath | None = None,
    compute: Compute | None = None,
    **options: Any,
) -> dict[str, float]:
    """Teaches a sparse model, in place, to answer as the dense model it was made from; no labels.

    Args:
        model: what `ermoe.upcycle` made of ``teacher``.
        teacher: the dense model, which stays as it is.
        batches: a list of batches or a data loader; labels are ignored.
        calibration: batches on which offsets are settled, where ``batches`` are augmented and these are not.
        held_out: other batches, on which the two are compared; by default the first few of ``batches``.
        folder: where checkpoints go, so that a run that was stopped goes on; without it, nothing is kept.
        compute: device, processes and console.
        options: fields of `Distillation`: ``layer_epochs``, ``epochs``, ``layer_lr``, ``lr``, ….

    Returns:
        ``agreement``, the share of held-out images that both give the same class; ``divergence``, the mean
        KL(teacher ‖ model); and ``layer_error``, the mean over layers of ‖ŷ − y‖ / ‖y‖, tokens weighed.

    >>> import timm
    >>> from ermoe.models.upcycle import upcycle
    >>> teacher = timm.create_model("test_vit").eval()
    >>> batches = [torch.randn(4, 3, 160, 160)]
    >>> options = {"init": "clusters", "calibration": batches, "num_experts": 2, "top_k": 1, "hidden_dim": 128}
    >>> model = upcycle(teacher, blocks=[5], **options)
    >>> sorted(distill(model, teacher, batches, layer_epochs=1, epochs=1))
    ['agreement', 'divergence', 'layer_error']
    """
    chosen, compute = Distillation(**options), compute or Compute()
    steps = _Steps(batches, chosen.seed)
    judged = list(islice(steps.epoch(0), 4)) if held_out is None else held_out
    teacher = teacher.to(compute.device).eval()
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()) if folder is None else folder)
        pair = _Pair(model, teacher, steps, judged, compute, calibration)
        figures: dict[str, float] = {}
        identity = pair.identity()
        learns = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
        if chosen.layer_epochs:
            _freeze_all_but_experts(model)
            settings = chosen.training(chosen.layer_epochs, chosen.layer_lr, steps.batch_size)
            figures = fit(LayerByLayer(pair), settings, place / "layers", config=identity, compute=compute)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(learns[name])
        if chosen.epochs:
            settings = chosen.training(chosen.epochs, chosen.lr, steps.batch_size)
            config = {**identity, "state_weight": chosen.state_weight}
            figures = fit(
                AsAWhole(pair, chosen.state_weight), settings, place / "whole", config=config, compute=compute
            )
    pair.settle()
    model.eval()
    return figures or pair.evaluate()


def _freeze_all_but_experts(model: nn.Module) -> None:
    freeze(model, "*")
    for layer in moe_layers(model).values():
        layer.experts.requires_grad_(True)
        if layer.shared is not None:
            layer.shared.requires_grad_(True)


@dataclass(slots=True)
class _Steps:
    """Batches in an order that follows from seed and epoch, where they are in memory; else as they come."""

    batches: Any
    seed: int

    def __post_init__(self) -> None:
        refuse_tensor(self.batches)
        if not isinstance(self.batches, Loader) and not hasattr(self.batches, "__len__"):
            raise UserError("batches can be gone through only once: pass a list of batches or a data loader")
        if len(self) == 0:
            raise UserError("there are no batches to learn from: pass at least one")

    def __len__(self) -> int:
        return self.batches.steps_per_epoch if isinstance(self.batches, Loader) else len(self.batches)

    @property
    def batch_size(self) -> int:
        """Images of a step."""
        return len(tensors_of(next(self.epoch(0)))[0])

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Any]:
        """Every step's batch from ``first_step`` on."""
        if isinstance(self.batches, Loader):
            yield from (part for (part,) in self.batches.epoch(epoch, first_step=first_step))
        elif isinstance(self.batches, Sequence):
            order = np.argsort(hashed(self.seed, epoch, np.arange(len(self.batches))), kind="stable")
            yield from (self.batches[index] for index in order[first_step:])
        else:
            yield from islice(iter(self.batches), first_step, None)


@dataclass(slots=True)
class _Pair:
    """A model, its teacher, and what both are shown."""

    model: nn.Module
    teacher: nn.Module
    steps: _Steps
    held_out: Iterable[Any]
    compute: Compute
    calibration: Iterable[Any] | None
    networks: dict[str, FFN] = field(init=False)
    measure: dict[str, tuple[Tensor, Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        family = family_of(self.model)
        blocks, taught = family.blocks(self.model), family_of(self.teacher).blocks(self.teacher)
        if len(blocks) != len(taught) or any(isinstance(block, SparseBlock) for _, block in taught):
            raise UserError("the teacher is not the dense model that this one was made from: pass that one")
        stood_for = {
            f"{name}.mlp": (dense, family.ffn(dense))
            for (name, block), (_, dense) in zip(blocks, taught, strict=True)
            if isinstance(block, SparseBlock)
        }
        if not stood_for:
            raise UserError("this model has no experts: make it sparse with ermoe.upcycle first")
        self.networks = {name: ffn for name, (_, ffn) in stood_for.items()}
        self.measure = self._measure(stood_for)

    def identity(self) -> Json:
        """What tells a run from others: the shapes of the model, the teacher's weights, and the first images.

        Not the model's own weights: experts that were fitted anew differ in their last digits. Nor images of a loader
        that draws them as it likes.
        """
        is_repeatable = isinstance(self.steps.batches, Loader | Sequence)
        first = islice(self.steps.epoch(0), 1) if is_repeatable else ()
        return {
            "model": {name: list(parameter.shape) for name, parameter in self.model.named_parameters()},
            "teacher": digest(self.teacher.parameters()),
            "images": digest(tensor for batch in first for tensor in tensors_of(batch)),
        }

    def _measure(self, networks: Networks) -> dict[str, tuple[Tensor, Tensor]]:
        """What positions (N,) and directions (D, D) mean for the teacher's answers, by layer."""
        images = (self.shown(batch) for batch in islice(self.steps.epoch(0), _BATCHES_TO_WEIGH))
        costs: dict[str, Tensor] = {}
        fisher: dict[str, Tensor] = {}
        for passed in tokens_and_gradients(self.teacher, networks, images):
            for name, (_, g_BND) in passed.items():
                costs[name] = costs.get(name, 0) + g_BND.square().sum(2).mean(0)
                fisher[name] = fisher.get(name, 0) + g_BND.flatten(0, 1).mT @ g_BND.flatten(0, 1)
        return {name: (weights_of(costs[name]), metric_of(fisher[name])) for name in networks}

    def shown(self, batch: Any) -> Any:
        """Its images, or its keyword arguments, as the model takes them."""
        device, dtype = self.compute.device, next(self.model.parameters()).dtype
        if isinstance(batch, Mapping):
            return {name: t.to(device, dtype if t.is_floating_point() else t.dtype) for name, t in batch.items()}
        return images_of(batch).to(device, dtype)

    @contextmanager
    def layer_errors(self) -> Iterator[dict[str, Tensor]]:
        """Within it, a pass of the model yields Σ w‖(ŷ − y)L‖² / Σ w‖yL‖² by layer, and no gradient leaves a layer."""
        errors: dict[str, Tensor] = {}

        def cut_off(layer: MixtureLayer, args: Any, kwargs: Any) -> Any:
            detached = tuple(arg.detach() if isinstance(arg, Tensor) else arg for arg in args)
            return detached, {k: v.detach() if isinstance(v, Tensor) else v for k, v in kwargs.items()}

        def compare(name: str, ffn: FFN) -> Any:
            def hook(layer: MixtureLayer, args: tuple[Tensor, ...], out_BND: Tensor) -> Tensor:
                with torch.no_grad():
                    wanted_BND = ffn(args[0].flatten(0, -2)).view_as(out_BND)
                weight_N, metric_DD = self.measure[name]
                missed, whole = (
                    (weight_N * (y_BND @ metric_DD).square().sum(-1)).sum()
                    for y_BND in (out_BND - wanted_BND, wanted_BND)
                )
                errors[name] = missed / whole
                return out_BND.detach()

            return hook

        layers = moe_layers(self.model)
        with ExitStack() as hooks:
            for name, ffn in self.networks.items():
                hooks.callback(layers[name].register_forward_pre_hook(cut_off, with_kwargs=True).remove)
                hooks.callback(layers[name].register_forward_hook(compare(name, ffn)).remove)
            yield errors

    def settle(self) -> str | None:
        """Offsets for the tokens that layers meet now, on the first few batches."""
        batches = self.steps.epoch(0) if self.calibration is None else self.calibration
        images = (self.shown(batch) for batch in islice(batches, _BATCHES_TO_SETTLE))
        return f"the first {_BATCHES_TO_SETTLE} batches" if settle_offsets(self.model, images) else None

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """How nearly the model answers as its teacher on held-out batches."""
        same = divergence = count = 0.0
        layer_error: list[float] = []
        with evaluating(self.model), self.layer_errors() as errors:
            for batch in self.held_out:
                shown = self.shown(batch)
                answer_BC, wanted_BC = _said(self.model, shown), _said(self.teacher, shown)
                same += float((answer_BC.argmax(1) == wanted_BC.argmax(1)).sum())
                divergence += float(_divergence(answer_BC, wanted_BC)) * len(wanted_BC)
                count += len(wanted_BC)
                layer_error.append(float(torch.stack(list(errors.values())).sqrt().mean()))
        if not count:
            raise UserError("held_out has no batches: pass some, or leave it out")
        mean_error = sum(layer_error) / len(layer_error)
        return {"agreement": same / count, "divergence": divergence / count, "layer_error": mean_error}


class LayerByLayer(Task):
    """Every layer learns the outputs of its dense network; see `ermoe.train.loop.Task`."""

    goal = "agreement"

    def __init__(self, pair: _Pair) -> None:
        self.model, self.pair = pair.model, pair

    @property
    def steps_per_epoch(self) -> int:
        return len(self.pair.steps)

    def batches(self, epoch: int, first_step: int) -> Iterator[list[Any]]:
        yield from ([batch] for batch in self.pair.steps.epoch(epoch, first_step))

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """Mean over layers of the squared relative error."""
        with self.pair.layer_errors() as errors:
            Eye(network)(self.pair.shown(batch))
        return torch.stack(list(errors.values())).mean()

    def settle(self) -> str | None:
        return self.pair.settle()

    def evaluate(self) -> dict[str, float]:
        return self.pair.evaluate()


class AsAWhole(LayerByLayer):
    """The model learns its teacher's answers, and what its blocks say on the way."""

    def __init__(self, pair: _Pair, state_weight: float) -> None:
        super().__init__(pair)
        self.state_weight = state_weight

    def loss(self, network: nn.Module, batch: Any) -> Tensor:
        """KL(teacher ‖ model), mean over images, and the weighted error of states."""
        shown = self.pair.shown(batch)
        with torch.no_grad(), _states(self.pair.teacher) as wanted:
            wanted_BC = _said(self.pair.teacher, shown)
        with _states(self.model) as found:
            divergence = _divergence(_said(network, shown), wanted_BC)
        pairs = zip(found, wanted, strict=True)
        errors = [(h_BND - t_BND).square().sum() / t_BND.square().sum() for h_BND, t_BND in pairs]
        return divergence + self.state_weight * torch.stack(errors).mean()


@contextmanager
def _states(model: nn.Module) -> Iterator[list[Tensor]]:
    """Within it, a pass of the model leaves what its blocks say in a list, first block first."""
    states: list[Tensor] = []

    def leaves(block: nn.Module, args: object, output: Any) -> None:
        states.append((output[0] if isinstance(output, tuple) else output).float())

    with ExitStack() as hooks:
        for _, block in family_of(model).blocks(model):
            hooks.callback(block.register_forward_hook(leaves).remove)
        yield states


def _said(network: nn.Module, shown: Any) -> Tensor:
    return answer(Eye(network)(shown)).float().flatten(0, -2)


def _divergence(answer_BC: Tensor, wanted_BC: Tensor) -> Tensor:
    return F.kl_div(answer_BC.log_softmax(1), wanted_BC.log_softmax(1), log_target=True, reduction="batchmean")
