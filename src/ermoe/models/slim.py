"""A sparse model that is faster than the dense one it came from: one expert a token, narrower than the dense network.

Which blocks get experts, and how wide they are, is chosen by error per operation. The error of a width is known in
closed form (`ermoe.models.fitting.errors_of_widths`), and so is, to second order, what it does to the answers. Widths
shrink step by step, always where the answers change least for an operation saved, until the whole model is within its
budget.
The experts are fitted to groups of tokens, and the model learns its dense form's answers (`ermoe.distill`).

Letters: T tokens, D model width, N tokens of an image.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.models.backbones import FFN, SparseBlock, family_of
from ermoe.models.clusters import errors_by_groups
from ermoe.models.count import count
from ermoe.models.tokens import sample_tokens
from ermoe.models.upcycle import upcycle
from ermoe.train.compute import Compute
from ermoe.train.distillation import distill
from ermoe.train.loader import Loader

_STEPS = 16  # widths are multiples of a sixteenth of the dense one
_TOKENS_TO_CHOOSE = 32_768


@dataclass(frozen=True, slots=True)
class SlimLayer:
    """What became of one block: the hidden width of its experts, its operations and parameters beside the dense ones.

    ``error`` is ‖ŷ − y‖ / ‖y‖ on tokens kept apart, before anything was learned; ``one_expert_error`` that of a single
    narrow network for all tokens.
    """

    name: str
    width: int
    dense_width: int
    error: float
    one_expert_error: float
    load_cv2: float


@dataclass(frozen=True, slots=True)
class Slimmed:
    """A slim model, and what is to be known of it. Operations are those of one image, as `ermoe.count` counts them.

    ``agreement`` is the share of held-out images that the slim and the dense model give the same class.
    """

    model: nn.Module
    layers: tuple[SlimLayer, ...]
    operations: int
    dense_operations: int
    parameters: int
    dense_parameters: int
    agreement: float
    divergence: float

    @property
    def share(self) -> float:
        """Operations over those of the dense model."""
        return self.operations / self.dense_operations

    def as_json(self) -> dict[str, Any]:
        """Everything but the model, as plain values."""
        figures = {name: getattr(self, name) for name in self.__slots__ if name not in ("model", "layers")}
        return {**figures, "share": self.share, "layers": [asdict(layer) for layer in self.layers]}

    def table(self) -> str:
        """A Markdown table of the layers, and a line of what it comes to."""
        rows = ["| block | hidden width | error | one expert | load CV² |", "| :-- | --: | --: | --: | --: |"]
        rows += [
            f"| {layer.name} | {layer.width} of {layer.dense_width} | {layer.error:.3f} | {layer.one_expert_error:.3f} "
            f"| {layer.load_cv2:.3f} |"
            for layer in self.layers
        ]
        larger = self.parameters / self.dense_parameters
        rows += [
            "",
            f"{self.share:.2f} of the dense operations, {larger:.1f} times the parameters; {self.agreement:.1%} of "
            "held-out images get the dense model's class.",
        ]
        return "\n".join(rows)


def slim(
    model: nn.Module,
    batches: Iterable[Any] | Loader[Any],
    *,
    budget: float = 0.8,
    num_experts: int = 8,
    calibration: Iterable[Any] | None = None,
    held_out: Iterable[Any] | None = None,
    folder: StrPath | None = None,
    compute: Compute | None = None,
    seed: int = 0,
    **distillation: Any,
) -> Slimmed:
    """A sparse model that takes at most ``budget`` of the dense model's operations; no labels.

    Args:
        model: a dense model of a known family; it stays as it is.
        batches: unlabelled images, a list of batches or a data loader.
        budget: operations of the slim model over those of the dense one, between 0 and 1.
        num_experts: of each layer. They cost memory, not operations.
        calibration: batches by which widths are chosen and to which experts are fitted; by default ``batches``, which
            may be augmented where these are not.
        held_out: other batches, on which the two are compared; by default the first few of ``batches``.
        folder: where checkpoints go, so that learning which was stopped goes on.
        compute: device, processes and console.
        seed: of the groups.
        distillation: options of `ermoe.distill`; ``layer_epochs=0, epochs=0`` leaves experts as they were fitted.

    >>> import timm
    >>> batches = [torch.randn(8, 3, 160, 160)]
    >>> slimmed = slim(timm.create_model("test_vit"), batches, num_experts=2, layer_epochs=0, epochs=0)
    >>> slimmed.share <= 0.8
    True
    """
    if not 0 < budget < 1:
        raise UserError(f"budget={budget}: need a share of the dense model's operations between 0 and 1, such as 0.8")
    device = (compute or Compute()).device
    model = model.to(device).eval()
    if calibration is None:
        if isinstance(batches, Loader):
            raise UserError("batches is a Loader, which varies images by epoch: pass calibration= as well")
        calibration = batches
    widths = choose_widths(model, calibration, budget, num_experts)
    slimmed = upcycle(
        model,
        blocks=list(widths),
        hidden_dim=list(widths.values()),
        num_experts=num_experts,
        top_k=1,
        experts="dense",
        init="clusters",
        calibration=calibration,
        generator=torch.Generator().manual_seed(seed),
    )
    given: dict[str, Any] = {"calibration": calibration, "held_out": held_out, "folder": folder, "compute": compute}
    figures = distill(slimmed, model, batches, seed=seed, **given, **distillation)
    return _described(slimmed, model, figures)


def _described(slimmed: Any, model: nn.Module, figures: dict[str, float]) -> Slimmed:
    dense, sparse = count(model), count(slimmed)
    family = family_of(model)
    dense_widths = {name: family.ffn(block).hidden_dim for name, block in family.blocks(model)}
    layers = tuple(
        SlimLayer(name, width, dense_widths[name], fit.error, fit.one_expert_error, fit.load_cv2)
        for (name, fit), width in zip(slimmed.group_fits.items(), slimmed.sparsity.hidden_dim, strict=True)
    )
    return Slimmed(
        slimmed,
        layers,
        operations=sparse.flops.total,
        dense_operations=dense.flops.total,
        parameters=sparse.total_parameters,
        dense_parameters=dense.total_parameters,
        agreement=figures["agreement"],
        divergence=figures["divergence"],
    )


def choose_widths(model: nn.Module, calibration: Iterable[Any], budget: float, num_experts: int) -> dict[int, int]:
    """The hidden width of the experts of each block that gets some, by its index; the other blocks stay dense."""
    family = family_of(model)
    blocks = family.blocks(model)
    if any(isinstance(block, SparseBlock) for _, block in blocks):
        raise UserError("this model is sparse already: slim the dense one")
    networks = {name: family.ffn(block) for name, block in blocks}
    taught = {name: (block, networks[name]) for name, block in blocks}
    tokens = sample_tokens(model, taught, calibration, max_tokens=_TOKENS_TO_CHOOSE)
    harm = {}  # what the answers suffer at 1, 2, … sixteenths of the width
    for name, ffn in networks.items():
        own = tokens.pop(name)
        widths = [_width(ffn, step) for step in range(1, _STEPS)]
        errors = errors_by_groups(ffn, own, num_experts, widths)
        harm[name] = [own.cost * error for error in (*errors, 0.0)]
    to_save = (1 - budget) * count(model).flops.total
    chosen = _shrink(networks, harm, to_save, family.num_tokens(model), num_experts)
    return {
        index: _width(networks[name], chosen[name]) for index, (name, _) in enumerate(blocks) if chosen[name] < _STEPS
    }


def _width(ffn: FFN, step: int) -> int:
    return ffn.hidden_dim * step // _STEPS


def _shrink(
    networks: dict[str, FFN], harm: dict[str, list[float]], to_save: float, num_tokens: int, num_experts: int
) -> dict[str, int]:
    """Sixteenths of the width that each network keeps, so that at least ``to_save`` operations are saved."""

    def saved(name: str, step: int) -> float:
        """Two operations for every entry of its matrices; experts must also be chosen."""
        ffn = networks[name]
        entries = len(ffn.linears()) * ffn.dim * (ffn.hidden_dim - _width(ffn, step))
        routing = max(8, num_experts) * ffn.dim if num_experts > 1 and step < _STEPS else 0
        return 2.0 * num_tokens * (entries - routing)

    kept = dict.fromkeys(networks, _STEPS)
    while sum(saved(name, step) for name, step in kept.items()) < to_save:
        # One step or several: the first step of a dense network also pays for its router.
        ways = [
            ((harm[name][fewer - 1] - harm[name][step - 1]) / (saved(name, fewer) - saved(name, step)), name, fewer)
            for name, step in kept.items()
            for fewer in range(1, step)
            if saved(name, fewer) > saved(name, step)
        ]
        if not ways:
            raise UserError(
                "the budget is below what the model takes without any feed-forward network: use a larger one"
            )
        _, name, fewer = min(ways)
        kept[name] = fewer
    return kept
