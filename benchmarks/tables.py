"""Writes the tables of README.md and docs/ from benchmarks/results: `make tables`.

A table stands in a document between `<!-- table: NAME -->` and `<!-- end of table -->`; a test fails where a document
and the records disagree.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path

import brain_ixi50
import brain_phantom_sites
import brain_regions
import brain_sites
import expert_findings
import figures
import real_weights
import retrieval_flickr8k
import routers_digits
import upcycle_cifar10

from ermoe.cli.info import ways_table
from ermoe.files import replacing
from ermoe.studies import comparison
from ermoe.studies.bench.measure import Measurement
from ermoe.studies.bench.parts import PASSES, SHAPES, table_of
from ermoe.studies.figures import Runs
from ermoe.studies.paired import apart
from ermoe.studies.paper.catalogue import ENTRIES, find
from ermoe.studies.paper.images import LABELS
from ermoe.studies.record import RECORDS, Record, read_records
from ermoe.studies.tables import Table, filled_in

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
TINY, CIFAR = "mini-tiny-imagenet-200-4-epochs", "mini-cifar-10-batches-bin-2-epochs"
FINE_TUNED = "tiny-{}-from-deit_tiny_patch16_224.safetensors"
FEATURES_PROBED = "tiny-{}-after-imagenet-mini-from-deit_tiny_patch16_224.safetensors"
PROBED = "mini-cifar-10-batches-bin-after-tiny-imagenet-200-4-epochs"
PREDICTED = {  # by the operations of the cost model, docs/explanation/cost-model.md
    "experts, E·r fixed": ("1", "1", "1", "1"),
    "experts, their products alone": ("1", "1", "1", "1"),
    "tokens": ("1", "2", "4"),
    "experts per token": ("1", "1.85", "2.70", "3.55"),
    "rank": ("1", "1.74", "3.18", "4.71"),
}
ROUTERS = {
    "dense": "dense",
    "eigen": "`eigen`, offsets",
    "eigen-mean": '`eigen`, `balance="mean"`',
    "eigen-none": '`eigen`, `balance="none"`',
    "eigen-dense-experts": '`eigen`, `experts="dense"`',
    "eigen-logit": '`eigen`, `score="logit"`, no balance',
    "v-moe-no-limit": "`v-moe`, no limit at inference",
}
ESTIMATES = {
    "vit3d": "3D ViT",
    "ermoe": "**ERMoE-ba**",
    "sfcn": "SFCN",
    "batch only": "the mean age of batch B in training",
    "tissue ridge": "tissue ridge, learnt from both batches",
    "swin3d": "3D Swin",
    "predict the mean": "the mean age of everybody in training",
}


@cache
def lines_of(study: str) -> list[Record]:
    """The runs of a study."""
    return read_records(RESULTS / f"{study}.jsonl")


def of_paper(study: str, place: str = "mini-bundled", *columns: str) -> Table:
    """A study's own table, or some of its columns, without rows that were not run."""
    scale, _, _ = place.partition("-")
    found = find(study, scale).findings(Runs(read_records(RESULTS / "paper" / study / place / RECORDS))).table
    table = found.only(*columns) if columns else found
    return Table(table.header, [row for row in table.rows if set(row[1:]) != {"–"}])


def fine_tuned(data: str, study: str = "finetune") -> Table:
    """What a study says of DeiT-Tiny in every sparse form, fine-tuned on ``data``."""
    return of_paper(study, FINE_TUNED.format(data))


def relabelled(table: Table, labels: dict[str, str], default: str = "{}") -> Table:
    """With other words in the first column."""
    return Table(table.header, [[labels.get(row[0], default.format(row[0])), *row[1:]] for row in table.rows])


def cifar10() -> Table:
    """Every router on CIFAR-10."""
    records = read_records(RESULTS / "cifar10" / RECORDS)
    steps = {name: Measurement(**step) for name, step in comparison.recorded_steps(records).items()}
    return comparison.table([record for record in records if record["name"] != comparison.STEPS], steps)


def bars() -> Table:
    """Every promise of the benchmarks, held or missed; those that depend on the processor, for each of them."""
    words = {True: "held", False: "**missed**"}
    last = {(record["name"], *figures.processor_of(record)): record for record in lines_of("bench")}
    rows = [
        [bar["name"], _short(bar["value"], 3), f"≤ {_short(bar['limit'], 2)}", words[bar["holds"]], _named(*own)]
        for name in ("layer", "parts", "routing", "model", "training", "scaling", "file", "start", "data", "scale")
        for own, record in last.items()
        if own[0] == name
        for bar in record["figures"]["bars"]
    ]
    return Table(["ratio", "measured", "bar", "", "benchmark"], rows)


def _short(value: float, digits: int) -> str:
    """
    >>> _short(0.9583, 3), _short(1.05, 2), _short(1e-4, 2)
    ('0.958', '1.05', '1e-04')
    """
    return f"{value:.{digits}f}" if value >= 10**-digits else f"{value:.0e}"


def _named(benchmark: str, *processor: str) -> str:
    return ", ".join([f"`{benchmark}`", *processor])


def parts(*processor: str) -> Table:
    """Where a layer's time goes, over the floor, as last measured on a processor."""
    found = [
        record["figures"]["tables"]
        for record in lines_of("bench")
        if record["name"] == "parts" and figures.processor_of(record) == processor
    ]
    places = [table_of(size, name) for size in SHAPES for name in PASSES]
    ratio = {place: {row["name"]: f"{row['ratio']:.3f}" for row in found[-1][place]} for place in places}
    names = list(dict.fromkeys(name for place in places for name in ratio[place]))
    rows = [[name, *(ratio[place].get(name, "–") for place in places)] for name in names if name != "floor"]
    return Table(["over the floor", *places], rows)


def growth() -> Table:
    """Time over that of the first case, and in brackets what the operations alone predict."""
    sweeps = figures.figures_of_benchmark("scaling")["tables"]
    rows = []
    for sweep, predicted in PREDICTED.items():
        cases = [f"{own['ratio']:.2f} ({by})" for own, by in zip(sweeps[sweep], predicted, strict=True)]
        names = ", ".join(own["name"] for own in sweeps[sweep])
        rows.append([f"{sweep}: {names}", "1", *cases[1:], *[""] * (4 - len(cases))])
    return Table(["sweep", "first", "second", "third", "fourth"], rows)


def peers() -> Table:
    """Every layer of the benchmark over the floor."""
    tables = figures.figures_of_benchmark("layer")["tables"]
    passes = {title.split(",")[0]: rows for title, rows in tables.items() if ", natural" in title}
    ratio = {title: {row["name"]: f"{row['ratio']:.2f}" for row in rows} for title, rows in passes.items()}
    names = [row["name"] for row in next(iter(passes.values()))]
    return Table(["layer", *ratio], [[name, *(own[name] for own in ratio.values())] for name in names])


def routers_layer() -> Table:
    """What each router costs, the cheapest first."""
    tables = figures.figures_of_benchmark("routers_layer")["tables"]
    ratio = {title: {row["name"]: row["ratio"] for row in rows} for title, rows in tables.items()}
    names = sorted(ratio["forward"], key=lambda name: ratio["forward"][name])
    labels = {"dense": "dense FFN", "eigen": "`eigen` (r = 24)"}
    return Table(
        ["router", *ratio],
        [[labels.get(name, f"`{name}`"), *(f"{own[name]:.2f}" for own in ratio.values())] for name in names],
    )


def regions() -> Table:
    """Region experts on phantoms that age in the front, three seeds."""
    labels = {f"frontal, blocks, {variant}, rate 0.003, decay 0.5": variant for variant in brain_regions.VARIANTS}
    return brain_regions.table(lines_of("brain_regions"), labels)


@cache
def ixi50_as_it_is() -> list[Record]:
    """Runs of the study without changes."""
    usual = {"init": "random", "register": "none", "changes": {}}
    return [record for record in lines_of("brain_ixi50") if usual.items() <= record["settings"].items()]


@cache
def ixi50_inside_b() -> tuple[Table, Table]:
    """Errors, and their differences."""
    return brain_ixi50.tables(ixi50_as_it_is(), brain_ixi50.Options(Path()))


def ixi50() -> Table:
    """Errors inside batch B."""
    return relabelled(ixi50_inside_b()[0], ESTIMATES)


def ixi50_differences() -> Table:
    """Between estimates, inside batch B."""
    found = ixi50_inside_b()[1]
    pairs = [" − ".join(ESTIMATES[name] for name in row[0].split(" − ")) for row in found.rows]
    return Table(found.header, [[pair, *row[1:]] for pair, row in zip(pairs, found.rows, strict=True)])


def ixi50_changes() -> Table:
    """The first shuffle and seed with a setting changed."""
    labels = {
        "ermoe, shuffle 0": "as it is",
        "ermoe, shuffle 0, phantom": "`--init phantom`",
        "ermoe, shuffle 0, affine": "`--register affine`",
        "ermoe, shuffle 0, rate_after_warm_start 0.1": "`--rate-after-warm-start 0.1`",
    }
    return brain_ixi50.changed([record for record in lines_of("brain_ixi50") if record["seed"] == 0], labels, "B")


def cell(table: Table, row: str, column: str) -> str:
    """One figure of a table."""
    index = list(table.header).index(column)
    return next(line[index] for line in table.rows if line[0] == row)


def beside_dense(row: str) -> str:
    """A verdict on a converted DeiT-Tiny: a difference whose interval holds zero is called equal."""
    found = apart(Runs(lines_of("real_weights")), (row,), ("dense",))
    assert found is not None
    words = "equal" if found.is_noise else "**win**" if found.mean > 0 else "**loss**"
    return f"{words}, {found}"


_PRICES = ("operations", "parameters")


def summary() -> Table:
    """Wins, losses and ties of the studies, a line each; README.md shows it."""
    cifar = cifar10()
    words = retrieval_flickr8k.towers(lines_of("flickr8k_deit"))
    layer, brains = parts(*figures.MEASURED_ON), ixi50()
    presets = ("cifar17-ermoe", "cifar17-v-moe", "cifar17-dense")
    photographs = partial(cell, real_weights.table(lines_of("real_weights")))
    models = (real_weights.LABELS[row] for row in ("exact", "slim-0.9", "slim-0.8", "dense"))
    converted, slim, slimmer, dense = (photographs(model, "top-1 %") for model in models)
    operations, parameters = (photographs(real_weights.LABELS["exact"], f"{of} ÷ dense") for of in _PRICES)
    price = f"for {float(operations):.1f} of the operations and {float(parameters):.1f} of the parameters"
    tuned, on_cifar = fine_tuned("tiny-imagenet-200"), fine_tuned("cifar-10-batches-bin")
    kept = [LABELS[method] for method in ("ermoe-shared", "v-moe", "dense")]
    compared = [
        _accuracies("Tiny-ImageNet", tuned, kept),
        _less_wins("operations there", *(cell(tuned, method, "operations ÷ dense") for method in kept)),
        _less_wins("parameters there", *(cell(tuned, method, "parameters ÷ dense") for method in kept)),
        _less_wins("load CV² there", *(cell(tuned, method, "load CV²") for method in kept)),
        _less_wins(
            "load CV² there, by the paper's rule, one seed",
            *(cell(tuned, LABELS[method], "load CV²") for method in ("ermoe-none", "v-moe")),
            "–",
        ),
        _accuracies("CIFAR-10", on_cifar, kept),
        (
            f"top-1 %, ImageNet photographs, DeiT-Tiny made sparse, {price}",
            converted,
            "–",
            dense,
            beside_dense("exact"),
        ),
        ("the same slimmed to 0.9 of the operations", slim, "–", dense, beside_dense("slim-0.9")),
        ("the same slimmed to 0.8 of the operations", slimmer, "–", dense, beside_dense("slim-0.8")),
        _less_wins("its time, 8 photographs on two cores", figures.time_of("slim-0.8"), "–", "1"),
        ("accuracy, CIFAR-10 from scratch", *(cell(cifar, name, "accuracy") for name in presets), "equal"),
        _less_wins("time of a training step there", *(cell(cifar, name, "step / dense") for name in presets)),
        _less_wins(
            "time of a layer of ViT-B, forward; two dense FFNs are 1", *_layer_times(layer, "ViT-B, forward"), "1"
        ),
        _less_wins("the same in training, with its penalty", *_layer_times(layer, "ViT-B, training"), "1"),
        _less_wins("time of a layer of DeiT-Ti, forward", *_layer_times(layer, "DeiT-Ti, forward"), "1"),
        (
            "RSUM, Flickr8k, DeiT-Tiny as image tower",
            *(cell(words, name, "RSUM") for name in ("ERMoE", "V-MoE", "dense")),
            "equal to V-MoE, **loss** to dense",
        ),
        ("error in years, brain age of 40 people", *_errors(brains), "equal"),
    ]
    return Table(["", "ERMoE", "V-MoE", "dense", "ERMoE beside them"], [list(line) for line in compared])


def _less_wins(what: str, ours: str, theirs: str, dense: str) -> tuple[str, ...]:
    """A line of which less is better, beside V-MoE, or beside the dense model where V-MoE has no figure.

    >>> _less_wins("time", "0.9", "–", "1")[-1], _less_wins("time", "1.8 (1.7–1.9)", "1.3 ± 0.1", "1")[-1]
    ('**win** over dense', '**loss** to V-MoE')
    """
    whom, other = ("dense", dense) if theirs == "–" else ("V-MoE", theirs)
    own, beside = (float(figure.split()[0]) for figure in (ours, other))
    verdict = f"**win** over {whom}" if own < beside else f"**loss** to {whom}" if own > beside else f"equal to {whom}"
    return what, ours, theirs, dense, verdict


def _accuracies(data: str, table: Table, methods: Sequence[str]) -> tuple[str, ...]:
    ours = methods[0]
    beside = f"{cell(table, ours, 'over V-MoE')} to V-MoE, {cell(table, ours, 'over dense')} to dense"
    accuracies = (cell(table, method, "accuracy") for method in methods)
    return (f"accuracy, DeiT-Tiny fine-tuned on {data}", *accuracies, beside)


def _layer_times(layer: Table, column: str) -> tuple[str, str]:
    return cell(layer, "ERMoE", column), cell(layer, "V-MoE", column)


def _errors(brains: Table) -> tuple[str, str, str]:
    column = "MAE of 40 people of batch B, years"
    return cell(brains, ESTIMATES["ermoe"], column), "–", cell(brains, ESTIMATES["vit3d"], column)


TABLES: dict[str, Callable[[], Table]] = {
    "summary": summary,
    "cifar10": cifar10,
    "bars": bars,
    "parts": partial(parts, *figures.MEASURED_ON),
    "parts-avx2": partial(parts, figures.MEASURED_ON[0], "AVX2"),
    "peers": peers,
    "growth": growth,
    "ways": lambda: ways_table(figures.ways_of_b16()),
    "routers-digits": lambda: relabelled(routers_digits.table(lines_of("routers_digits")), ROUTERS, "`{}`"),
    "routers-layer": routers_layer,
    "real-weights": lambda: real_weights.table(lines_of("real_weights")),
    "fine-tuning-tiny-imagenet": partial(fine_tuned, "tiny-imagenet-200"),
    "fine-tuning-cifar10": partial(fine_tuned, "cifar-10-batches-bin"),
    "stability": partial(fine_tuned, "tiny-imagenet-200", "stability"),
    "upcycle-cifar10": lambda: upcycle_cifar10.table(lines_of("upcycle_cifar10")),
    "upcycle-cifar10-pairs": lambda: upcycle_cifar10.pairs(lines_of("upcycle_cifar10")),
    "flickr8k": lambda: retrieval_flickr8k.table(lines_of("flickr8k")),
    "flickr8k-deit": lambda: retrieval_flickr8k.towers(lines_of("flickr8k_deit")),
    "flickr8k-deit-pairs": lambda: retrieval_flickr8k.pairs(lines_of("flickr8k_deit")),
    "expert-groups": lambda: expert_findings.groups_table(lines_of(expert_findings.STUDY)),
    "expert-looks": lambda: expert_findings.looks_table(lines_of(expert_findings.STUDY)),
    "expert-sky": lambda: expert_findings.expert_table(lines_of(expert_findings.STUDY), "contrast"),
    "brain-regions": regions,
    "brain-ixi50": ixi50,
    "brain-ixi50-differences": ixi50_differences,
    "brain-ixi50-all": lambda: relabelled(
        brain_ixi50.everybody(ixi50_as_it_is(), "B"),
        ESTIMATES | {"batch only": "the mean age of one's batch in training"},
    ),
    "brain-ixi50-changes": ixi50_changes,
    "brain-sites-left-out": lambda: brain_sites.left_out_table(lines_of("brain_sites")),
    "brain-sites-pairs": lambda: brain_sites.together_table(lines_of("brain_sites"), ["ermoe"]),
    "brain-sites": lambda: brain_sites.transfer_table(lines_of("brain_sites")),
    "brain-phantom-sites": lambda: brain_phantom_sites.table(lines_of("brain_phantom_sites")),
    "brain-batches": lambda: brain_sites.batches_table(lines_of("brain_sites")),
    "brain-harmonised": lambda: brain_sites.harmonised_table(lines_of("brain_sites")),
    **{name: partial(of_paper, name) for name, entry in ENTRIES.items() if entry.place is not None},
    "imagenet-deit": lambda: of_paper("imagenet", FINE_TUNED.format("imagenet-mini")),
    "efficiency-deit": lambda: of_paper("efficiency", FINE_TUNED.format("imagenet-mini")),
    "few-shot-deit-cifar10": partial(of_paper, "few-shot", FEATURES_PROBED.format("cifar-10-batches-bin")),
    "few-shot-deit-tiny-imagenet": partial(of_paper, "few-shot", FEATURES_PROBED.format("tiny-imagenet-200")),
    "balance-deit": lambda: of_paper(
        "balance", FINE_TUNED.format("tiny-imagenet-200"), "paper", "load CV²", "max / mean load", "dropped", "accuracy"
    ),
    "expert-choice-deit": lambda: of_paper("expert-choice", FINE_TUNED.format("tiny-imagenet-200")),
    "top-k-deit": lambda: of_paper(
        "top-k", FINE_TUNED.format("tiny-imagenet-200"), "accuracy, swept", "over k = 2", "tail mass, swept"
    ),
    "train-heatmaps-deit": lambda: of_paper("train-heatmaps", FINE_TUNED.format("tiny-imagenet-200")),
    "threshold-deit": lambda: of_paper(
        "threshold",
        FINE_TUNED.format("tiny-imagenet-200"),
        "fallback, ERMoE (paper's rule)",
        "pruned: experts a token",
        "pruned: accuracy",
        "pruned: load CV²",
    ),
    "threshold": lambda: of_paper(
        "threshold",
        TINY,
        "fallback, ERMoE (paper's rule)",
        "fallback, ERMoE with offsets",
        "pruned: experts a token",
        "pruned: accuracy",
    ),
    "top-k": lambda: of_paper(
        "top-k", TINY, "accuracy, swept", "accuracy, retrained", "tail mass, swept", "time of a pass, k = 2 is 1"
    ),
    "balance": lambda: of_paper("balance", TINY, "paper", "load CV²", "busiest expert", "accuracy"),
    "lambda": lambda: of_paper("lambda", CIFAR, "paper", "validation loss", "accuracy", "drift ‖UᵀU−I‖₂"),
    "ablation": lambda: of_paper(
        "ablation",
        PROBED,
        "paper: 5-shot",
        "5 epochs",
        "5 images a class",
        "paper: load CV²",
        "load CV²",
        "paper: fallback %",
        "fallback",
    ),
}


def documents() -> Sequence[Path]:
    """All that may have tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def written_anew(document: Path) -> str:
    """A document as its records have it."""
    return filled_in(document.read_text(encoding="utf-8"), TABLES, figures.FIGURES)


def main() -> None:
    for document in documents():
        text = written_anew(document)
        if text != document.read_text(encoding="utf-8"):
            with replacing(document) as draft:
                draft.write_text(text, encoding="utf-8")
            print(f"written: {document.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
