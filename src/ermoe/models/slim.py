"""A sparse model with fewer operations than the dense one it came from: one expert a token, narrower than the network.

Which blocks get experts, how many and how wide, is chosen by what each size does to the answers for an operation saved
(`ermoe.models.sizes`). The experts, and what all tokens share beside them, are fitted to groups of tokens
(`ermoe.models.clusters`), and the model learns its dense form's answers (`ermoe.distill`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ermoe.errors import UserError
from ermoe.files import StrPath, from_json, read_object, to_json, write_json
from ermoe.models.backbones import family_of
from ermoe.models.clusters import GroupFit
from ermoe.models.count import count
from ermoe.models.digest import digest
from ermoe.models.io import load, save
from ermoe.models.passes import refuse_tensor, tensors_of
from ermoe.models.sizes import Kind, Size, choose_sizes, entries_of
from ermoe.models.upcycle import upcycle
from ermoe.nn import MixtureLayer, moe_layers
from ermoe.nn.ffn import FFN
from ermoe.train.compute import Compute
from ermoe.train.distillation import distill
from ermoe.train.loader import Loader

_FITS = "fits.json"


@dataclass(frozen=True, slots=True)
class SlimLayer:
    """What became of one block: its experts, and its operations and parameters over those of the dense network.

    A token meets ``width`` hidden units, of which ``shared`` are those of a network for all tokens. ``error`` is
    ‖ŷ − y‖ / ‖y‖ on tokens kept apart, weighed by what they mean, before anything was learned; ``one_expert_error``
    that of a single such network for all tokens. ``rank`` is None where only widths are cut; of the dense network its
    matrices count, not its biases.
    """

    name: str
    num_experts: int
    width: int
    shared: int
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
            "shared",
            "rank",
            "operations",
            "parameters",
            "error",
            "one expert",
            "load CV²",
        )
        rows = [f"| {' | '.join(header)} |", "| :-- " + "| --: " * (len(header) - 1) + "|"]
        rows += [
            f"| {layer.name} | {layer.num_experts} | {layer.width} of {layer.dense_width} | {layer.shared} "
            f"| {layer.rank or 'full'} | {layer.operations:.2f} | {layer.parameters:.2f} | {layer.error:.3f} "
            f"| {layer.one_expert_error:.3f} | {layer.load_cv2:.3f} |"
            for layer in self.layers
        ]
        larger = self.parameters / self.dense_parameters
        rows += [
            "",
            f"{self.share:.2f} of the dense operations, {larger:.1f} times the parameters. The dense model's class is "
            f"given to {self.agreement:.1%} of the images by which both were compared.",
        ]
        return "\n".join(rows)


def slim(
    model: nn.Module,
    batches: Iterable[Any] | Loader[Any],
    *,
    budget: float = 0.8,
    num_experts: int = 8,
    routed: float = 1.0,
    routing_cost: float = 0.1,
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
        routed: share of the dense hidden width that each expert has to itself; other units that are kept belong to a
            network which all tokens share. With 1 nothing is shared. With less, 0.125 for instance, the model is
            smaller and faster, and farther from the dense one.
        routing_cost: what a router has to save beyond its operations, over those of the dense network, for a block to
            get experts; else it gets one network for all tokens. Sorting, gathering and combining take nearly twice
            the default in DeiT-Tiny on two cores, and less in larger models. With 0 operations alone count.
        cut: "width" leaves fewer hidden units; "rank" keeps all, with factors of lower rank, and shares nothing.
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
    if not 0 < routed <= 1:
        raise UserError(f"routed={routed}: need a share of the hidden width, above 0 and at most 1, such as 0.125")
    if routing_cost < 0:
        raise UserError(f"routing_cost={routing_cost}: need 0 or more, of a dense network's operations, such as 0.1")
    if cut not in ("width", "rank"):
        raise UserError(f"cut={cut!r}: use 'width' or 'rank'")
    device = (compute or Compute()).device
    model = model.to(device).eval()
    if calibration is None:
        if isinstance(batches, Loader):
            raise UserError("batches is a Loader, which varies images by epoch: pass calibration= as well")
        calibration = batches
    for passed in (batches, calibration):
        refuse_tensor(passed)
        if isinstance(passed, Iterator):
            raise UserError("an iterator can be gone through only once: pass a list of batches or a data loader")
    kind = Kind(num_experts, cut, routed, routing_cost)
    choice: dict[str, Any] = {"budget": budget, "kind": kind, "seed": seed}
    if folder is None:
        slimmed = fit_slim(model, calibration, **choice)
    else:
        slimmed = _fitted_once(Path(folder) / "fitted", model, calibration, choice)
    given: dict[str, Any] = {"calibration": calibration, "held_out": held_out, "folder": folder, "compute": compute}
    figures = distill(slimmed, model, batches, seed=seed, **given, **distillation)
    return _described(slimmed, model, figures)


def fit_slim(model: nn.Module, calibration: Iterable[Any], *, budget: float, kind: Kind, seed: int) -> nn.Module:
    """The slim model before it has learned: sizes chosen, experts fitted to groups of tokens."""
    sizes = choose_sizes(model, calibration, budget, kind)
    own, is_rank = [size.own for size in sizes.values()], kind.cut == "rank"
    return upcycle(
        model,
        blocks=list(sizes),
        num_experts=[size.num_experts for size in sizes.values()],
        hidden_dim=None if is_rank else own,
        shared=None if is_rank else [size.shared for size in sizes.values()],
        rank=own if is_rank else None,
        top_k=1,
        experts="eigen" if is_rank else "dense",
        init="clusters",
        calibration=calibration,
        generator=torch.Generator().manual_seed(seed),
    )


def _fitted_once(place: Path, model: nn.Module, calibration: Iterable[Any], choice: dict[str, Any]) -> nn.Module:
    """What `fit_slim` makes, which takes minutes; kept in ``place``, so that a run which was stopped goes on from it.

    It is known by the choice, the dense weights and the first images.
    """
    first = (tensor for batch in islice(calibration, 1) for tensor in tensors_of(batch))
    origin = {**to_json(choice), "model": digest(model.parameters()), "images": digest(first)}
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
    shared = 0 if layer.shared is None else layer.shared.size[0]
    met = Size(num_experts, shared + width if rank is None else rank, shared)
    return SlimLayer(
        name,
        num_experts,
        shared + width,
        shared,
        rank,
        dense_width=ffn.hidden_dim,
        operations=met.entries(ffn, is_rank=rank is not None) / entries_of(ffn),
        parameters=sum(p.numel() for p in layer.parameters()) / entries_of(ffn),
        error=fit.error,
        one_expert_error=fit.one_expert_error,
        load_cv2=fit.load_cv2,
    )
