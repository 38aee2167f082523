"""`record_routing`: watch every mixture-of-experts layer of a model while it runs, and say what was seen."""

from __future__ import annotations

import html
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ermoe.analysis import measures
from ermoe.analysis.summary import MEASURES, Summary, geometry_figures, markdown, routing_figures
from ermoe.analysis.tally import Tally
from ermoe.errors import UserError
from ermoe.files import StrPath
from ermoe.nn import MixtureLayer, moe_layers


class RoutingRecorder:
    """Records what every MoE layer of a model does inside a ``with`` block, without changing its outputs.

    Its memory depends on layers, experts and classes, never on the number of batches. Entering it again goes on
    counting. ``tallies`` holds the raw totals of each layer.

    Args:
        model: any module with MoE layers; compiled, wrapped in DDP or checkpointed ones too.
        classes: number or names of the classes that `labels` will speak of.
        previous: a finished recording of the same inputs in the same order; gives the routing fluctuation.
        probe_tokens: how many tokens are kept for that comparison, from the first one on.

    >>> from ermoe.nn import EigenMoE
    >>> layer = EigenMoE(16, num_experts=4, score="energy", generator=torch.Generator().manual_seed(0))
    >>> with record_routing(layer) as routing:
    ...     y = layer(torch.randn(8, 10, 16))
    >>> routing.summary()[""]["tokens"]
    80.0
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        classes: int | Sequence[str] | None = None,
        previous: RoutingRecorder | None = None,
        probe_tokens: int = 4096,
    ) -> None:
        self.layers = moe_layers(model)
        if not self.layers:
            raise UserError(
                "the model has no mixture-of-experts layer to record: make it sparse with ermoe.upcycle(model), "
                "or put an ermoe.EigenMoE into it"
            )
        self.class_names = _names(classes)
        self.previous = previous
        self.tallies = {
            name: _tally(layer, num_classes=len(self.class_names), probe_tokens=probe_tokens)
            for name, layer in self.layers.items()
        }
        if previous is not None:
            _check_same_layers(self.tallies, previous.tallies)
        self._is_open = False
        self._is_reduced = False
        self._geometry: Summary | None = None
        self._changed: dict[str, Tensor] | None = None

    def __enter__(self) -> RoutingRecorder:
        if self._is_open or self._is_reduced:
            raise ValueError("this recording is open already, or summed over processes: call record_routing again")
        self._is_open = True
        self._geometry = self._changed = None
        for name, layer in self.layers.items():
            layer.observers.append(self.tallies[name].add)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_open = False
        for name, layer in self.layers.items():
            layer.observers[:] = [observer for observer in layer.observers if observer != self.tallies[name].add]

    def labels(self, label_G: Tensor) -> None:
        """The classes of the next forward pass: one label for each image of the batch, or one for each token.

        A negative label means "none". Tokens without a label are left out of the class–expert table, and so are
        labels too large for ``classes``: the latter raise ValueError, unless finding out would mean waiting for a GPU.
        """
        if not self.class_names:
            raise UserError("labels need to know the classes: use record_routing(model, classes=NUMBER or NAMES)")
        label_G = label_G.detach().reshape(-1)
        if label_G.device.type == "cpu" and len(label_G) and int(label_G.max()) >= len(self.class_names):
            raise UserError(
                f"label {int(label_G.max())} is outside of classes 0 to {len(self.class_names) - 1}: give "
                "record_routing all classes"
            )
        for tally in self.tallies.values():
            tally.label_G = label_G.to(tally.totals.count_E.device, torch.long, non_blocking=True)

    def reduce(self) -> RoutingRecorder:
        """Sums the recording over all processes; call it on every one of them, after the ``with`` block.

        It is a step of its own because reports are usually written by one process alone, where a hidden collective
        would wait for ever. Under FSDP it also gathers the bases, for `summary` to measure. Without a process group,
        or when called again, it does nothing.
        """
        if self._is_open:
            raise ValueError("reduce() belongs after the with block: the recording is still open")
        if not self._is_reduced and dist.is_available() and dist.is_initialized():
            self._geometry = {name: geometry_figures(layer) for name, layer in self.layers.items()}
            self._changed = self._compare()
            totals = [tensor for tally in self.tallies.values() for tensor in tally.totals.tensors()]
            _sum_over_processes([*totals, *self._changed.values()])
            self._is_reduced = True
        return self

    def summary(self) -> Summary:
        """{layer name: {measure: value}} with every measure of `ermoe.analysis.summary.MEASURES`.

        A measure that has no meaning for a layer's router is NaN. Those of the bases are of the weights as they were
        at the first call after the ``with`` block.
        """
        geometry = self._geometry
        if geometry is None:
            geometry = {name: geometry_figures(layer) for name, layer in self.layers.items()}
            self._geometry = None if self._is_open else geometry
        changed = self._compare() if self._changed is None else self._changed
        return {name: self._figures(name, geometry[name], changed.get(name)) for name in self.layers}

    def _figures(self, name: str, geometry: dict[str, float], changed: Tensor | None) -> dict[str, float]:
        fluctuation = math.nan if changed is None else float(changed[0] / changed[1])
        figures = {**routing_figures(self.tallies[name]), **geometry, "fluctuation": fluctuation}
        return {measure: figures[measure] for measure in MEASURES}

    def _compare(self) -> dict[str, Tensor]:
        """By layer, how many tokens of the probe changed an expert and how many were compared."""
        if self.previous is None:
            return {}
        before = {name: tally.probe() for name, tally in self.previous.tallies.items()}
        return {
            name: _count_changed(before[name].to(tally.probe().device), tally.probe())
            for name, tally in self.tallies.items()
            if name in before
        }

    def table(self) -> str:
        """The summary as a Markdown table, which also reads well in a terminal: ``print(routing.table())``."""
        return markdown(self.summary())

    def report(self, path: StrPath, *, title: str = "Routing") -> Path:
        """Writes one self-contained HTML file: load curves, class–expert maps, score histograms, all measures."""
        from ermoe.analysis.report import routing_report

        return routing_report(self, title=title).write(path)

    def show(self, *, height: int = 640) -> Shown:
        """The report for the last line of a notebook's cell, without a file or a server; printed, it is the table."""
        from ermoe.analysis.report import routing_report

        return Shown(routing_report(self).html(), self.table(), height)


@dataclass(frozen=True, slots=True)
class Shown:
    """A page that notebooks show inline, within itself; ``table`` is what there is to read without them."""

    page: str
    table: str
    height: int

    def _repr_html_(self) -> str:
        look = "border: 1px solid #d0d5dd; border-radius: 8px"
        page = html.escape(self.page)
        return f'<iframe srcdoc="{page}" width="100%" height="{self.height}" style="{look}" title="Routing"></iframe>'

    def __repr__(self) -> str:
        return self.table


record_routing = RoutingRecorder
"""``with ermoe.record_routing(model) as routing: …``"""


def _names(classes: int | Iterable[str] | None) -> list[str]:
    if classes is None:
        return []
    return [str(c) for c in (range(classes) if isinstance(classes, int) else classes)]


def _tally(layer: MixtureLayer, *, num_classes: int, probe_tokens: int) -> Tally:
    return Tally(
        layer.experts.num_experts,
        top_k=None if layer.router is None else layer.router.top_k,
        threshold=None if layer.router is None else layer.router.threshold,
        num_classes=num_classes,
        probe_tokens=probe_tokens,
        device=next(layer.parameters()).device,
    )


def _check_same_layers(now: dict[str, Tally], before: dict[str, Tally]) -> None:
    for name in now.keys() & before.keys():
        if now[name].num_experts != before[name].num_experts:
            raise ValueError(
                f"layer {name!r} has {now[name].num_experts} experts now and had {before[name].num_experts} in the "
                "previous recording: compare recordings of one model"
            )


def _count_changed(before_PE: Tensor, after_PE: Tensor) -> Tensor:
    """(changed, compared), over the tokens both have seen; padding uses no expert in either and is not compared."""
    common = min(len(before_PE), len(after_PE))
    before_PE, after_PE = before_PE[:common], after_PE[:common]
    compared_P = before_PE.any(-1) | after_PE.any(-1)
    return torch.stack([(measures.changed(before_PE, after_PE)).sum(), compared_P.sum()])


def _sum_over_processes(tensors: Sequence[Tensor]) -> None:
    """In place, with one collective for each dtype."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        same = [tensor for tensor in tensors if tensor.dtype == dtype]
        flat = torch.cat([tensor.reshape(-1).to(same[0].device) for tensor in same])
        dist.all_reduce(flat)
        for tensor, total in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
            tensor.copy_(total.view_as(tensor))
