"""Brain age on people from another scanner: IXI (50) and ds002748 (36), one to learn from and one to be judged on.

Questions to every method, shuffle and seed:

- transfer: learnt from IXI, judged on ds002748: correlation, error, bias, spread, coverage and score of the intervals,
  and what recalibrating with 15 people of ds002748 leaves of the bias of the others (200 draws, stratified by group);
- sites: all 86 people, each site left out in turn;
- together: all 86 people in five folds, with ridges of their own for sites and batches;
- harmonised, if asked for: the same with --harmonise site in place of those.

    python benchmarks/brain_sites.py IXI DS002748 [--methods ridge ermoe] [--shuffles 3] [--seeds 0 1 2] [--threads 2]

A queue that resumes: a line a run in benchmarks/results/brain_sites.jsonl; one that was interrupted goes on.
"""

from __future__ import annotations

import csv
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import tyro
from rich.console import Console

from ermoe.brain.data.cache import Archive
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import figures, paired_difference
from ermoe.brain.model import BrainAgeModel, predict
from ermoe.brain.recalibration import Recalibration
from ermoe.brain.run import train
from ermoe.studies.record import Job, Record, run_queue
from ermoe.studies.tables import Table

RESULTS = Path(__file__).parent / "results"
_DRAWS, _CONTROLS, _OTHERS = 200, 5, 10


@dataclass(frozen=True)
class Options:
    """Train on one scanner and judge on another, with and without a network."""

    ixi: Annotated[Path, tyro.conf.Positional]
    ds002748: Annotated[Path, tyro.conf.Positional]
    out: Path = RESULTS
    runs: Path = Path("runs/brain-sites")
    """Where the run folders go; they are not part of the results."""
    cache: Path | None = None
    methods: tuple[str, ...] = ("ridge", "ermoe")
    questions: tuple[str, ...] = ("transfer", "sites", "together")
    shuffles: int = 3
    """Of the folds; one will do for sites, which are not shuffled."""
    seeds: tuple[int, ...] = (0, 1, 2)
    """Of the networks; one will do for the ridge."""
    threads: int = 2


def main() -> None:
    options = tyro.cli(Options)
    torch.set_num_threads(options.threads)
    console = Console()
    records = run_queue("brain_sites", jobs(options, console), options.out / "brain_sites.jsonl", console=console)
    for table in (
        f(records) for f in (transfer_table, left_out_table, together_table, batches_table, harmonised_table)
    ):
        console.print(table.markdown(), end="\n\n", highlight=False, soft_wrap=True)


def jobs(options: Options, console: Console) -> list[Job]:
    """Methods innermost, so that an unfinished study still compares them."""
    ask = {"transfer": transfer, "sites": together, "together": together, "harmonised": together}
    found = []
    for seed in options.seeds:
        for shuffle in range(options.shuffles):
            for question in options.questions:
                for method in options.methods:
                    is_repeated = (method == "ridge" and seed) or (question == "sites" and shuffle)
                    if not is_repeated:
                        work = partial(ask[question], options, question, method, shuffle, seed, console)
                        settings = {"question": question, "method": method, "shuffle": shuffle}
                        found.append(Job(f"{question}, {method}, shuffle {shuffle}", seed, work, settings))
    return found


def trained(
    options: Options, data: Path, question: str, method: str, shuffle: int, seed: int, console: Console
) -> tuple[Path, BrainAgeModel]:
    """The run of a question, and its model."""
    folder = options.runs / f"{question}-{method}-shuffle{shuffle}-seed{seed}"
    split = "leave-site-out" if question == "sites" else "k-fold"
    asked = {"method": method, "split": split, "fold_seed": shuffle, "seed": seed}
    asked |= {"harmonise": "site", "own_ridges": "none"} if question == "harmonised" else {}
    return folder, train(data, folder, cache=options.cache, console=console, check=False, **asked)


def transfer(options: Options, question: str, method: str, shuffle: int, seed: int, console: Console) -> dict[str, Any]:
    """Learnt from IXI, judged on ds002748."""
    _, model = trained(options, options.ixi, question, method, shuffle, seed, console)
    scans = open_cohort(options.ds002748).with_age
    rows = list(predict(model, scans, read=Archive.at(options.cache).volumes(model.preprocessing).volume))
    age, predicted = np.array([row.age for row in rows]), np.array([row.brain_age for row in rows])
    low, high = (np.array([getattr(row, name) for row in rows]) for name in ("brain_age_low", "brain_age_high"))
    known = [scan.age for scan in open_cohort(options.ixi).with_age]
    usual = np.quantile(known, [0.05, 0.95])[:, None] * np.ones(len(age))
    return {
        "people": [row.participant_id for row in rows],
        "group": [scan.columns.get("group") for scan in scans],
        "age": age.tolist(),
        "predicted": predicted.round(3).tolist(),
        "ridge": [round(row.brain_age_ridge, 3) for row in rows],
        "low": low.round(3).tolist(),
        "high": high.round(3).tolist(),
        "distance": [round(row.distance, 3) for row in rows],
        "flagged": sum(bool(row.unlike_training) for row in rows),
        "network_worth": model.blend.worth,
        **{name: round(value, 4) for name, value in figures(age, predicted).items()},
        "spread": float(predicted.std() / age.std()),
        "coverage": float(((low <= age) & (age <= high)).mean()),
        "interval_score": interval_score(age, low, high),
        "interval_score_of_training_ages": interval_score(age, *usual),
        "bias_after_recalibration": bias_after_recalibration(age, predicted, [s.columns.get("group") for s in scans]),
    }


def interval_score(age: np.ndarray, low: np.ndarray, high: np.ndarray) -> float:
    """Mean width of 90 % intervals, plus 20 times what is missed (Gneiting and Raftery)."""
    return float((high - low + 20 * np.maximum(low - age, 0) + 20 * np.maximum(age - high, 0)).mean())


def bias_after_recalibration(age: np.ndarray, predicted: np.ndarray, group: list[str | None]) -> float:
    """Median over draws of 15 people of the absolute mean error of the others."""
    random = np.random.default_rng(0)
    is_control = np.array([name == "control" for name in group])
    found = []
    for _ in range(_DRAWS):
        drawn = [
            random.permutation(np.flatnonzero(is_control == wanted))[:number]
            for wanted, number in ((True, _CONTROLS), (False, _OTHERS))
        ]
        used = np.concatenate(drawn)
        rest = np.setdiff1d(np.arange(len(age)), used)
        line = Recalibration.fit(age[used], predicted[used])
        found.append(abs(float((line.intercept + line.slope * predicted[rest] - age[rest]).mean())))
    return float(np.median(found))


def together(options: Options, question: str, method: str, shuffle: int, seed: int, console: Console) -> dict[str, Any]:
    """All people in one cohort: the estimates of everybody by a fold that had not learnt from them."""
    folder, model = trained(options, both(options), question, method, shuffle, seed, console)
    evaluation = Evaluation.read(folder, cache=options.cache)
    return {
        "people": evaluation.people,
        "site": [scan.site for scan in evaluation.scans],
        "batch": [scan.columns.get("batch") for scan in evaluation.scans],
        "age": evaluation.held_out.age_N.round(3).tolist(),
        "estimates": {name: values.round(3).tolist() for name, values in evaluation.estimates.items()},
        "coverage": evaluation.held_out.coverage,
        "network_worth": [own.worth for own in model.blend_of_fold.values()],
    }


def both(options: Options) -> Path:
    """A table of the people of both data sets."""
    path = options.runs / "both.tsv"
    path.parent.mkdir(parents=True, exist_ok=True)
    (tissues,) = options.ixi.glob("derivatives/*/dseg.tsv")
    shutil.copy(tissues, path.parent / "dseg.tsv")
    scans = [scan for root in (options.ixi, options.ds002748) for scan in open_cohort(root.resolve()).with_age]
    with open(path, "w", newline="") as file:
        table = csv.writer(file, delimiter="\t")
        table.writerow(["participant_id", "t1", "age", "sex", "site", "batch", "dseg"])
        for scan in scans:
            batch = scan.columns.get("batch", "n/a")
            table.writerow([scan.participant_id, scan.t1, scan.age, scan.sex, scan.site, batch, scan.labels or "n/a"])
    return path


def transfer_table(records: list[Record]) -> Table:
    """Means over runs of what was found on the other scanner."""
    shown = {"r": "r", "mae": "MAE", "bias": "bias", "spread": "spread", "coverage": "coverage of 90 %"}
    shown |= {"interval_score": "interval score", "interval_score_of_training_ages": "of training ages"}
    shown |= {"bias_after_recalibration": "bias after recalibration"}
    own = [record for record in records if record["settings"]["question"] == "transfer"]
    rows = []
    for method in dict.fromkeys(record["settings"]["method"] for record in own):
        found = [record["figures"] for record in own if record["settings"]["method"] == method]
        means = [f"{np.mean([figures[name] for figures in found]):.2f}" for name in shown]
        rows.append([method, str(len(found)), *means])
    return Table(["IXI → ds002748", "runs", *shown.values()], rows)


def left_out_table(records: list[Record]) -> Table:
    """Each site judged by what the other has taught, of the people of IXI also those of its large batch."""
    found = [
        r["figures"] for r in records if r["settings"]["question"] == "sites" and r["settings"]["method"] != "ridge"
    ]
    first, age = found[0], np.array(found[0]["age"])
    level = np.array([batch or site for batch, site in zip(first["batch"], first["site"], strict=True)])
    judged = {"ds002748": level == "ds002748", "IXI": level != "ds002748", "IXI, batch B": level == "B"}
    rows = []
    for name, inside in judged.items():
        own = age[inside]
        for estimate, label in (("ermoe", "the default"), ("ridge + whole network", "with the whole network")):
            errors = [np.array(figures["estimates"][estimate])[inside] - own for figures in found]
            shown = [
                np.mean([np.corrcoef(own, own + error)[0, 1] for error in errors]),
                np.mean([np.abs(error).mean() for error in errors]),
                np.mean([error.mean() for error in errors]),
                np.mean([np.abs(error - error.mean()).mean() for error in errors]),
                np.abs(own - own.mean()).mean(),
            ]
            rows.append([name, label, *(f"{value:.2f}" for value in shown)])
    return Table(["left out", "estimate", "r", "MAE", "bias", "MAE without bias", "MAE of their own mean"], rows)


def together_table(records: list[Record], methods: Sequence[str] = ()) -> Table:
    """Of all methods, or some: the method minus other estimates of the same folds, where the two differ.

    Errors are averaged over runs for each person, and people resampled.
    """
    asked = {"sites": "each site left out", "together": "five folds"}
    rows = []
    for question, label in asked.items():
        own = [record for record in records if record["settings"]["question"] == question]
        for method in methods or dict.fromkeys(record["settings"]["method"] for record in own):
            found = [record["figures"] for record in own if record["settings"]["method"] == method]
            error = {
                name: np.mean([np.abs(np.subtract(f["estimates"][name], f["age"])) for f in found], axis=0)
                for name in found[0]["estimates"]
            }
            for name in error:
                if name == "ridge" or not np.array_equal(error[name], error["ridge"]):
                    difference = paired_difference(found[0]["people"], error[method], error[name], draws=10_000)
                    rows.append([label, method, name, f"{error[name].mean():.2f}", difference.text()])
    return Table(["split", "method", "estimate", "MAE, years", "method − estimate"], rows)


def batches_table(records: list[Record]) -> Table:
    """All people in five folds: the method, beside a ridge fitted inside each batch or site alone, over its people."""
    rows = []
    own = [record for record in records if record["settings"]["question"] == "together"]
    for method in dict.fromkeys(record["settings"]["method"] for record in own):
        found = [record["figures"] for record in own if record["settings"]["method"] == method]
        level = np.array([batch or site for batch, site in zip(found[0]["batch"], found[0]["site"], strict=True)])
        inside = {name: "ridge inside site" if name in found[0]["site"] else "ridge inside batch" for name in level}
        error = {
            name: np.mean([np.abs(np.subtract(f["estimates"][name], f["age"])) for f in found], axis=0)
            for name in (method, "ridge over all", *set(inside.values()))
        }
        for name in sorted(set(level)):
            rows_N, beside = level == name, inside[name]
            people = np.array(found[0]["people"])[rows_N].tolist()
            difference = paired_difference(people, error[method][rows_N], error[beside][rows_N], draws=10_000).text()
            years = (f"{error[one][rows_N].mean():.2f}" for one in (method, "ridge over all", beside))
            rows.append([method, name, str(len(people)), str(len(found)), *years, difference])
    columns = ["method", "batch or site", "people", "runs", "MAE, years", "ridge over all", "ridge fitted inside"]
    return Table([*columns, "method − inside"], rows)


def harmonised_table(records: list[Record]) -> Table:
    """With --harmonise site minus without it, both without ridges of sites' own, over the shuffles that both have, and
    over the people of each batch."""
    found: dict[tuple[str, str], dict[tuple[int, int], dict[str, Any]]] = {}
    for record in records:
        asked = record["settings"]
        runs = found.setdefault((asked["method"], asked["question"]), {})
        runs[asked["shuffle"], record["seed"]] = record["figures"]
    rows = []
    for method in dict.fromkeys(method for method, _ in found):
        plain, other = (found.get((method, question), {}) for question in ("together", "harmonised"))
        if shared := sorted(plain.keys() & other.keys()):
            first = plain[shared[0]]
            before, after = (
                np.mean([np.abs(np.subtract(own[run]["estimates"][name], own[run]["age"])) for run in shared], axis=0)
                for own, name in ((plain, "ridge over all"), (other, method))
            )
            level = np.array([batch or site for batch, site in zip(first["batch"], first["site"], strict=True)])
            for name in ("all", *sorted(set(level))):
                own = np.full(len(level), True) if name == "all" else level == name
                people = np.array(first["people"])[own].tolist()
                difference = paired_difference(people, after[own], before[own], draws=10_000).text()
                years = (f"{error[own].mean():.2f}" for error in (before, after))
                rows.append([method, name, str(len(shared)), *years, difference])
    return Table(["method", "people", "runs", "MAE, years", "harmonised", "difference"], rows)


if __name__ == "__main__":
    main()
