"""A sparse model that is faster than the dense one it came from: one expert a token, narrower than the dense network.

Which blocks get experts, how many and how wide, is chosen by error per operation. The error of a width is known in
closed form (`ermoe.models.fitting.errors_of_widths`), and so is, to second order, what it does to the answers. Widths
shrink step by step, always where the answers change least for an operation saved, until the whole model is within its
budget. A block whose tokens are better served by one network for all, such as a last one in which only class tokens
count, gets that.
The experts are fitted to groups of tokens, and the model learns its dense form's answers (`ermoe.distill`).

Letters: T tokens, D model width, N tokens of an image.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ermoe.errors import UserError
from ermoe.files import StrPath, from_json, read_object, write_json
from ermoe.models.backbones import SparseBlock, family_of
from ermoe.models.clusters import GroupFit, errors_by_groups
from ermoe.models.count import count
from ermoe.models.fitting import errors_of_ranks, errors_of_widths
from ermoe.models.io import load, save
from ermoe.models.passes import images_of
from ermoe.models.tokens import Tokens, sample_tokens
from ermoe.models.upcycle import upcycle
from ermoe.nn import MixtureLayer, moe_layers
from ermoe.nn.ffn import FFN
from ermoe.train.compute import Compute
from ermoe.train.distillation import distill
from ermoe.train.loader import Loader

_STEPS = 16  # widths are multiples of a sixteenth of the dense one
_TOKENS_TO_CHOOSE = 32_768
_FITS = "fits.json"


@dataclass(frozen=True, slots=True)
class SlimLayer:
    """What became of one block: its experts, and its operations and parameters over those of the dense network.

    ``error`` is ‖ŷ − y‖ / ‖y‖ on tokens kept apart, weighed by what they mean, before anything was learned;
    ``one_expert_error`` that of a single such network for all tokens. ``rank`` is None where only widths are cut; of
    the dense network its matrices count, not its biases.
    """

    name: str
    num_experts: int
    width: int
    rank: int | None
    dense_width: int
    operations: float
    parameters: float
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
        header = (
            "block",
            "experts",
            "hidden width",
            "rank",
            "operations",
            "parameters",
            "error",
            "one expert",
            "load CV²",
        )
        rows = [f"| {' | '.join(header)} |", "| :-- " + "| --: " * (len(header) - 1) + "|"]
        rows += [
            f"| {layer.name} | {layer.num_experts} | {layer.width} of {layer.dense_width} | {layer.rank or 'full'} "
            f"| {layer.operations:.2f} | {layer.parameters:.2f} | {layer.error:.3f} | {layer.one_expert_error:.3f} "
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
    cut: str = "width",
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
        num_experts: of a layer, unless one network is better for all its tokens. They cost memory, not operations.
        cut: "width" gives experts fewer hidden units; "rank" keeps all, with factors of lower rank.
        calibration: batches by which widths are chosen and to which experts are fitted; by default ``batches``, which
            may be augmented where these are not.
        held_out: other batches, on which the two are compared; by default the first few of ``batches``.
        folder: where fitted experts and checkpoints go, so that a run which was stopped goes on.
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
    if cut not in ("width", "rank"):
        raise UserError(f"cut={cut!r}: use 'width' or 'rank'")
    device = (compute or Compute()).device
    model = model.to(device).eval()
    if calibration is None:
        if isinstance(batches, Loader):
            raise UserError("batches is a Loader, which varies images by epoch: pass calibration= as well")
        calibration = batches
    choice: dict[str, Any] = {"budget": budget, "num_experts": num_experts, "cut": cut, "seed": seed}
    if folder is None:
        slimmed = fit_slim(model, calibration, **choice)
    else:
        slimmed = _fitted_once(Path(folder) / "fitted", model, calibration, choice)
    given: dict[str, Any] = {"calibration": calibration, "held_out": held_out, "folder": folder, "compute": compute}
    figures = distill(slimmed, model, batches, seed=seed, **given, **distillation)
    return _described(slimmed, model, figures)


def fit_slim(
    model: nn.Module, calibration: Iterable[Any], *, budget: float, num_experts: int, cut: str, seed: int
) -> nn.Module:
    """The slim model before it has learned: sizes chosen, experts fitted to groups of tokens."""
    sizes = choose_sizes(model, calibration, budget, num_experts, cut)
    kept = [size.kept for size in sizes.values()]
    return upcycle(
        model,
        blocks=list(sizes),
        num_experts=[size.num_experts for size in sizes.values()],
        hidden_dim=kept if cut == "width" else None,
        rank=kept if cut == "rank" else None,
        top_k=1,
        experts="dense" if cut == "width" else "eigen",
        init="clusters",
        calibration=calibration,
        generator=torch.Generator().manual_seed(seed),
    )


def _fitted_once(place: Path, model: nn.Module, calibration: Iterable[Any], choice: dict[str, Any]) -> nn.Module:
    """What `fit_slim` makes, which takes minutes; kept in ``place``, so that a run which was stopped goes on from it.

    It is known by the choice, the dense weights and the first images.
    """
    first = [images_of(batch) for batch in islice(calibration, 1)]
    origin = {**choice, "model": _digest(model.state_dict().values()), "images": _digest(first)}
    if (place / _FITS).exists():
        about = read_object(place / _FITS, "remove its folder to fit anew")
        if about.get("origin") == origin:
            slimmed = load(place, device=next(model.parameters()).device)
            kept = {name: from_json(GroupFit, fit, where=str(place)) for name, fit in about["fits"].items()}
            _backbone(slimmed).group_fits = kept
            return slimmed
    slimmed = fit_slim(model, calibration, **choice)
    with suppress(UserError):  # a class of one's own, which no file can name, is fitted anew
        save(slimmed, place)
        fits = {name: asdict(fit) for name, fit in _backbone(slimmed).group_fits.items()}
        write_json(place / _FITS, {"origin": origin, "fits": fits})
    return slimmed


def _backbone(model: nn.Module) -> Any:
    return family_of(model).backbone(model)


def _digest(tensors: Iterable[Any]) -> str:
    """Tells weights, or images, from others."""
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _described(slimmed: Any, model: nn.Module, figures: dict[str, float]) -> Slimmed:
    dense, sparse = count(model), count(slimmed)
    family, mixtures = family_of(model), moe_layers(slimmed)
    networks = {name: family.ffn(block) for name, block in family.blocks(model)}
    layers = tuple(
        _layer(name, mixtures[f"{name}.mlp"], networks[name], fit)
        for name, fit in _backbone(slimmed).group_fits.items()
    )
    return Slimmed(
        slimmed,
        layers,
        operations=sparse.multiply_adds.total,
        dense_operations=dense.multiply_adds.total,
        parameters=sparse.total_parameters,
        dense_parameters=dense.total_parameters,
        agreement=figures["agreement"],
        divergence=figures["divergence"],
    )


def _layer(name: str, layer: MixtureLayer, ffn: FFN, fit: GroupFit) -> SlimLayer:
    num_experts, (width, rank) = layer.experts.num_experts, layer.experts.size
    kept = Size(num_experts, width if rank is None else rank)
    return SlimLayer(
        name,
        num_experts,
        width,
        rank,
        dense_width=ffn.hidden_dim,
        operations=kept.entries(ffn, is_rank=rank is not None) / _entries(ffn),
        parameters=sum(p.numel() for p in layer.parameters()) / _entries(ffn),
        error=fit.error,
        one_expert_error=fit.one_expert_error,
        load_cv2=fit.load_cv2,
    )


@dataclass(frozen=True, slots=True)
class Size:
    """Of the experts of one block: how many there are, and the hidden width, or the rank, that each keeps."""

    num_experts: int
    kept: int

    def entries(self, ffn: FFN, *, is_rank: bool) -> int:
        """Entries of the matrices that a token meets, the router's among them: each is two operations."""
        each = self.kept * (ffn.dim + ffn.hidden_dim if is_rank else ffn.dim)
        routing = max(8, self.num_experts) * ffn.dim if self.num_experts > 1 else 0
        return len(ffn.linears()) * each + routing


def _entries(ffn: FFN) -> int:
    return len(ffn.linears()) * ffn.dim * ffn.hidden_dim


def choose_sizes(
    model: nn.Module, calibration: Iterable[Any], budget: float, num_experts: int, cut: str = "width"
) -> dict[int, Size]:
    """The size of the experts of each block that gets some, by its index; the other blocks stay dense."""
    family = family_of(model)
    blocks = family.blocks(model)
    if any(isinstance(block, SparseBlock) for _, block in blocks):
        raise UserError("this model is sparse already: slim the dense one")
    networks = {name: family.ffn(block) for name, block in blocks}
    if cut == "width" and any(ffn.inner_norm is not None for ffn in networks.values()):
        raise UserError(
            "the networks of this model normalise their hidden layers, which fewer units change: cut='rank'"
        )
    taught = {name: (block, networks[name]) for name, block in blocks}
    tokens = sample_tokens(model, taught, calibration, max_tokens=_TOKENS_TO_CHOOSE)
    harm = {name: _harm(ffn, tokens.pop(name), num_experts, cut) for name, ffn in networks.items()}
    to_save = (1 - budget) * count(model).multiply_adds.total / family.num_tokens(model)
    chosen = _shrink(networks, harm, to_save, is_rank=cut == "rank")
    return {index: size for index, (name, _) in enumerate(blocks) if (size := chosen[name]) is not None}


def _harm(ffn: FFN, tokens: Tokens, num_experts: int, cut: str) -> dict[Size, float]:
    """What the answers suffer, to second order, from experts of each size that may be chosen."""
    whole, errors_of = (
        (ffn.hidden_dim, errors_of_widths) if cut == "width" else (min(ffn.dim, ffn.hidden_dim), errors_of_ranks)
    )
    kept = sorted({max(1, whole * step // _STEPS) for step in range(1, _STEPS)})
    alone = errors_of(ffn, tokens, kept)
    harm = {Size(1, size): tokens.cost * error for size, error in zip(kept, alone, strict=True)}
    if num_experts > 1:  # an expert may also be the one for all, where that is better
        grouped = errors_by_groups(ffn, tokens, num_experts, lambda ffn, own: errors_of(ffn, own, kept))
        harm |= {Size(num_experts, k): tokens.cost * min(e, a) for k, e, a in zip(kept, grouped, alone, strict=True)}
    return harm


def _shrink(
    networks: dict[str, FFN], harm: dict[str, dict[Size, float]], to_save: float, *, is_rank: bool
) -> dict[str, Size | None]:
    """The size of each network, None for one that stays, such that at least ``to_save`` entries a token are saved."""

    def saved(name: str, size: Size | None) -> int:
        return 0 if size is None else _entries(networks[name]) - size.entries(networks[name], is_rank=is_rank)

    def suffered(name: str, size: Size | None) -> float:
        return 0.0 if size is None else harm[name][size]

    chosen: dict[str, Size | None] = dict.fromkeys(networks)
    while sum(saved(name, size) for name, size in chosen.items()) < to_save:
        # One step or several: the first step of a dense network also pays for its router.
        ways = [
            ((suffered(name, size) - suffered(name, now)) / (saved(name, size) - saved(name, now)), name, size)
            for name, now in chosen.items()
            for size in harm[name]
            if saved(name, size) > saved(name, now)
        ]
        if not ways:
            raise UserError(
                "the budget is below what the model takes without any feed-forward network: use a larger one"
            )
        _, name, size = min(ways, key=lambda way: way[:2])
        chosen[name] = size
    return chosen
