"""``ermoe info``: what a model costs, part by part, beside what the paper prints."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console

from ermoe.errors import UserError

if TYPE_CHECKING:
    from ermoe.models.count import Count
    from ermoe.models.presets import Way
    from ermoe.studies.tables import Table


@dataclass(frozen=True, slots=True)
class Info:
    """Parameters and multiply-adds per image of a model, by part, beside the paper's figures.

    Presets: paper-b16, parity-b16, dense-experts-b16, v-moe-b16, vit-b16, huge-h14, small-s16, tiny-ti16. Nothing is
    downloaded and no weights are made. With --cluster HOSTSxDEVICES it says instead what training asks of every device,
    for each --parallel: memory without activations, what a step sends, and how long the slowest link takes for that.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="PRESET|FOLDER")]
    """A preset, a run folder, or a model folder."""
    cluster: str | None = None
    """Hosts and devices of each, such as 16x8."""
    images: int = 32
    """With --cluster: images on each device in a step."""
    memory: float = 80
    """With --cluster: of a device, in GB."""
    network: float = 25
    """With --cluster: what a device sends to other hosts, in GB a second."""
    link: float = 300
    """With --cluster: what a device sends within its host, in GB a second."""

    def __post_init__(self) -> None:
        if min(self.images, self.memory, self.network, self.link) <= 0:
            raise UserError("--images, --memory, --network and --link must be more than 0")

    def __call__(self, console: Console) -> None:
        if self.cluster is not None:
            _show_cluster(self, console)
            return
        if not Path(self.model).is_dir():
            _show_preset(self.model, console)
            return
        from ermoe.models.count import count
        from ermoe.models.io import weightless
        from ermoe.train.run_folder import model_folder

        _show(self.model, count(weightless(model_folder(self.model))), console)


def _show_preset(name: str, console: Console) -> None:
    from ermoe.models import presets

    chosen = presets.preset(name)
    console.print(f"[bold]{name}[/bold]: {chosen.about}")
    _show(name, presets.count_preset(chosen), console)
    console.print(ways_table(presets.ways(chosen)).terminal())
    if name in presets.PAPER:
        console.print(presets.WHAT_DOES_NOT_FIT)


def _show_cluster(info: Info, console: Console) -> None:
    from ermoe.models import layouts, presets
    from ermoe.models.io import weightless
    from ermoe.studies.tables import Table
    from ermoe.train.run_folder import model_folder

    hosts, devices = _hosts_and_devices(info.cluster or "")
    is_folder = Path(info.model).is_dir()
    model = weightless(model_folder(info.model)) if is_folder else presets.preset(info.model).build(device="meta")
    size = layouts.size_of(model)
    parts = ("tokens", "routing columns", "parameters, twice", "gradients")
    rows = []
    for layout in layouts.layouts(size, hosts, devices):
        needed = layouts.needs(size, layout, images=info.images)
        left = info.memory - needed.memory / 1e9
        seconds = layouts.seconds(needed, layout, hosts, devices, network=1e9 * info.network, link=1e9 * info.link)
        among = f" {layout.expert_processes}" if layout.parallel.endswith("ep") else ""
        sent = [f"{needed.sent[part] / 1e9:.2f}" if part in needed.sent else "–" for part in parts]
        fits = f"{left:.1f}" if left > 0 else "none"
        rows.append([layout.parallel + among, f"{needed.memory / 1e9:.1f}", fits, *sent, f"{1e3 * seconds:.0f}"])
    millions = presets.millions
    console.print(
        f"{info.model}: {millions(size.experts)} parameters in experts, {millions(size.rest)} in the rest; "
        f"{hosts * devices} devices of {info.memory:g} GB, {info.images} images of {size.tokens} tokens on each; "
        "float32, AdamW, even routing"
    )
    header = ["parallel", "GB held", "GB left", "tokens", "columns", "weights", "gradients", "ms"]
    console.print(Table(header, rows).terminal())
    console.print(
        "Held: parameters, gradients and moments, and what is gathered for a block; left: for activations. Tokens, "
        "routing columns, weights and gradients: GB that a device sends in a step; ms: on the slower link, if nothing "
        "is hidden behind computing. The number beside ep is --expert-processes."
    )


def _hosts_and_devices(text: str) -> tuple[int, int]:
    """
    >>> _hosts_and_devices("16x8")
    (16, 8)
    """
    hosts, _, devices = text.partition("x")
    if not (hosts.isdecimal() and devices.isdecimal() and int(hosts) >= 1 and int(hosts) * int(devices) > 1):
        raise UserError(f"--cluster {text}: give hosts and devices of each, such as 16x8, at least two devices in all")
    return int(hosts), int(devices)


def _show(name: str, counted: Count, console: Console) -> None:
    from ermoe.models import presets
    from ermoe.studies.tables import Table

    console.print(Table(["", "counted", "paper prints"], _sizes(name, counted)).terminal())
    console.print(Table(["part", "multiply-adds", "share"], presets.parts(counted)).terminal())


def _sizes(name: str, counted: Count) -> list[list[str]]:
    from ermoe.models import presets

    paper = presets.PAPER.get(name)
    own, total, active, work, routing = counted.multiply_adds, "–", "–", "–", "–"
    if paper is not None:
        total, active, work = f"{paper.total:.1f} M", f"{paper.active:.1f} M", f"{paper.multiply_adds:.1f} G"
        routing = f"{paper.routing:.2f} G" if paper.routing else "–"
    return [
        ["parameters", presets.millions(counted.total_parameters), total],
        ["active for a token", presets.millions(counted.active_parameters), active],
        ["multiply-adds per image", presets.multiply_adds(own.total), work],
        ["  of which routing", presets.multiply_adds(own.routing), routing],
    ]


def ways_table(ways: list[Way]) -> Table:
    """What each way of making a dense ViT sparse costs; the last is V-MoE."""
    from ermoe.models.presets import millions, multiply_adds
    from ermoe.studies.tables import Table

    header = [
        "8 experts, 2 a token",
        "parameters",
        "experts: multiply-adds",
        "of V-MoE's",
        "routing, context",
        "parity",
    ]
    rows, v_moe = [], ways[-1].count.multiply_adds.experts
    for way in ways:
        work, size = way.count.multiply_adds, millions(way.count.total_parameters)
        experts = work.experts + work.shared_expert
        ours = [multiply_adds(experts), f"{experts / v_moe:.2f} ×"]
        rows.append([way.name, size, *ours, multiply_adds(work.routing + work.context), way.parity])
    return Table(header, rows)
