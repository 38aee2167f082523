"""One HTML report of a run, inside a BIDS derivative with its tables, figures and model card."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ermoe.analysis.page import Markup, Page, bullets, data_uri, escape, figure, grid, heading, table
from ermoe.brain.ages import age_residualised_gap
from ermoe.brain.data.tables import write_text
from ermoe.brain.evaluation import Evaluation, labels
from ermoe.brain.metrics import FEWEST, LABELS, Array, Figure, decade
from ermoe.brain.reporting import pictures
from ermoe.brain.reporting.derivative import RESEARCH_USE, describe, model_card, write_table
from ermoe.brain.reporting.people import methods_section
from ermoe.brain.reporting.pictures import Album
from ermoe.brain.reporting.routing_sections import routing_sections
from ermoe.train.compute import Compute

_FLAT = 0.5
"""Slope of predicted against chronological age below which a report begins with it."""
_MOST_COLUMNS = 4
"""Groups in a table, so that none is wider than a page."""
_MOST_SCANS = 60
"""Mosaics on a page; of a larger cohort only the worst."""


def report(
    run: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    cache: str | os.PathLike[str] | None = None,
    calibration_fit: str | None = None,
    occlusion_scans: int = 4,
    compute: Compute | None = None,
) -> Path:
    """Writes the derivative of a finished run, ``RUN/derivatives/ermoe-ba`` by default; returns the page's path."""
    compute = Compute() if compute is None else compute
    evaluation = Evaluation.read(run, cache=cache, calibration_fit=calibration_fit, device=compute.device)
    folder = Path(out) if out is not None else Path(run) / "derivatives" / "ermoe-ba"
    made_up = ", synthetic brains" if evaluation.is_synthetic else ""
    name = f"Brain age of {evaluation.model.facts['data']}, {evaluation.method}{made_up}"
    readme = "Predictions of held-out people: desc-heldout_brainage.tsv; their errors: desc-metrics_brainage.tsv."
    describe(folder, name=name, data=evaluation.config["data"]["path"], readme=readme)
    _write_predictions(evaluation, folder / "desc-heldout_brainage.tsv")
    _write_metrics(evaluation, folder / "desc-metrics_brainage.tsv")
    known = _warnings(evaluation)
    card = model_card(evaluation.model, warnings=known)
    write_text(folder / "model-card.md", card.markdown())
    album = Album(folder / "figures")
    page = Page(name, lead=RESEARCH_USE, facts=_facts(evaluation))
    if known:
        page.section("Read this first", "What to know before the figures below.", [bullets(known)])
    _scatter(page, evaluation, album)
    _accuracy(page, evaluation)
    _calibration(page, evaluation)
    _groups(page, evaluation)
    _training(page, evaluation, album)
    routing_sections(page, evaluation, album, occlusion_scans=occlusion_scans, compute=compute)
    _mosaics(page, evaluation)
    headed = ((heading(title), bullets(said)) for title, said in card.sections.items())
    statements = [part for pair in headed for part in pair]
    page.section("Model card", f"{RESEARCH_USE} In the same words as model-card.md.", statements)
    methods_section(
        page, evaluation.model, f"ermoe brain train …-{evaluation.method} {evaluation.config['data']['path']}"
    )
    page.contents()
    return page.write(folder / "report.html")


def _warnings(evaluation: Evaluation) -> list[str]:
    """Sentences a reader must not miss."""
    found = ["these brains are synthetic: never quote the figures"] if evaluation.is_synthetic else []
    found += [*evaluation.confounds, *_beaten(evaluation)]
    if evaluation.model.facts.get("network_worth") == 0:
        found.append("people held out found nothing in what the network adds: the ridge alone answers")
    if "ridge over all" in evaluation.estimates:
        error = evaluation.figures(evaluation.estimates["ridge over all"])["mae"].value
        found.append(
            "sites, scanners or batches have ridges of their own here; people of another one get the ridge over all, "
            f"whose error is {error:.1f} years"
        )
    if refusals := evaluation.held_out.refusals:
        found.append(refusals[0] + (f" (and {len(refusals) - 1} more folds)" if len(refusals) > 1 else ""))
    slope = evaluation.figures(evaluation.held_out.raw_N)["slope"].value
    if slope < _FLAT:
        found.append(
            f"predictions rise by only {slope:.2f} years a year of age: the young look older and the old younger than "
            "they are, so a gap means nothing unless age is a covariate"
        )
    people = len(set(evaluation.people))
    if people < 100:
        found.append(f"{people} people are few: read the intervals, not the figures")
    if evaluation.calibration_fit == "train":
        found.append("calibration was fitted on training predictions, as in the paper; those are over-fitted")
    return found


def _beaten(evaluation: Evaluation) -> list[str]:
    """By which simple estimates the method is beaten, and whether it is any better than the mean, where it counts."""
    method, found = evaluation.method, []
    for group, rows in evaluation.leading.items():
        where = "" if group == "all" else f", within {group}"
        for other in evaluation.estimates:
            ahead = evaluation.difference(other, rows) if "ridge" in other and other != method else None
            if ahead is not None and ahead.value > 0 and ahead.text() != "0.00 [0.00, 0.00]":
                chance = "" if ahead.low > 0 else ", which may be chance"
                found.append(f"{other} beats {method} by {ahead.text()} years{where}{chance}")
        mean = evaluation.difference("predict the mean", rows)
        if mean.high >= 0:
            found.append(f"{method} is no better than the mean age: difference {mean.text()} years{where}")
    return found


def _worth(evaluation: Evaluation) -> str:
    """What the network was worth, in a sentence; nothing where there is no network beside a ridge."""
    worth = evaluation.model.facts.get("network_worth")
    if worth is None:
        return ""
    of_fold = [f"{own.worth:.0%}" for own in evaluation.model.blend_of_fold.values()]
    folds = f" (fold by fold {', '.join(of_fold)})" if len(set(of_fold)) > 1 else ""
    return f" Of what the network adds to the ridge, {worth:.0%} is believed, as people held out say{folds}."


def _facts(evaluation: Evaluation) -> dict[str, str]:
    age_N, raw_N = evaluation.held_out.age_N, evaluation.held_out.raw_N
    worth = evaluation.model.facts.get("network_worth")
    errors = {
        "raw MAE"
        if group == "all"
        else f"raw MAE within {group}": f"{evaluation.figures(raw_N, rows)['mae'].text()} years"
        for group, rows in evaluation.leading.items()
    }
    return {
        **errors,
        "people": str(len(set(evaluation.people))),
        "scans": str(len(evaluation.scans)),
        "age": f"{age_N.mean():.1f} ± {age_N.std():.1f} ({age_N.min():.0f}–{age_N.max():.0f})",
        "split": f"{evaluation.outputs.splits.kind}, {evaluation.outputs.splits.num_folds}",
        **({} if worth is None else {"network's worth": f"{worth:.0%}"}),
    }


def _scatter(page: Page, evaluation: Evaluation, album: Album) -> None:
    tested = evaluation.held_out
    title, group_N = _grouping(evaluation)
    drawn = pictures.scatter(tested.age_N, tested.raw_N, group_N)
    gaps = pictures.gap_against_age(tested.age_N, evaluation.corrected())
    tends = "Predictions tend to the mean, so the raw gap falls with age; calibration turns it, and adds noise."
    panels = [
        album.panel(drawn, "scatter", "Raw predictions.", f"One point a scan, by {title}."),
        album.panel(gaps, "gap-against-age", "Gap against age.", tends),
    ]
    coverage = "" if np.isnan(tested.coverage) else f" The 90 % intervals held {tested.coverage:.0%} of the ages."
    lead = f"Of people whom the judging fold had not learnt from.{coverage}{_worth(evaluation)}"
    page.section("Predicted against chronological age", lead, [grid(panels, pairs=True)])


def _grouping(evaluation: Evaluation) -> tuple[str, list[str]]:
    """What points are coloured by, and the group of each scan: the site, else a label that tells age, else the sex."""
    known = labels(evaluation.outputs.scans)
    for name in ("site", *evaluation.confounders):
        if name in known:
            return name, [known[name](scan) or "n/a" for scan in evaluation.scans]
    return "sex", [scan.sex or "n/a" for scan in evaluation.scans]


def _accuracy(page: Page, evaluation: Evaluation) -> None:
    absolute, paired = [], []
    groups = list(evaluation.levels.items())
    for levels in (groups[start : start + _MOST_COLUMNS] for start in range(0, len(groups), _MOST_COLUMNS)):
        first = levels[0][0]
        header = ["estimate", f"r, {first}", *(f"MAE, {name} ({int(rows.sum())})" for name, rows in levels)]
        rows = []
        for name, predicted_N in evaluation.estimates.items():
            found = [evaluation.figures(predicted_N, wanted) for _, wanted in levels]
            rows.append([name, found[0]["r"].text(), *(own["mae"].text() for own in found)])
        absolute.append(table(header, rows, strong=evaluation.method))
        differences = [
            [f"{evaluation.method} − {other}", *(evaluation.difference(other, wanted).text() for _, wanted in levels)]
            for other in evaluation.estimates
            if other != evaluation.method
        ]
        paired.append(table(["difference", *(name for name, _ in levels)], differences))
    page.section(
        "How far off",
        "Raw predictions of people whom the judging fold had not learnt from; years, with 95 % intervals over "
        "resampled people. All rows use the same folds. Within one site or batch, a label tells only its mean age.",
        absolute,
    )
    page.section(
        "Against the simple estimates",
        f"Difference of the mean absolute errors over the same people; below zero {evaluation.method} is better.",
        paired,
    )


def _calibration(page: Page, evaluation: Evaluation) -> None:
    found = {name: evaluation.figures(predicted_N) for name, predicted_N in evaluation.corrected().items()}
    rows = [[title, *(own[name].text() for own in found.values())] for name, title in LABELS.items()]
    page.section(
        "Raw and calibrated",
        "The headline is raw. Calibrated predictions are (raw − a) / b; a and b come from people of other folds or of "
        "validation, so no age corrects itself.",
        [table(["figure", *found], rows)],
    )


def _groups(page: Page, evaluation: Evaluation) -> None:
    shown = ("mae", "r", "gap_age_r", "slope", "bias")
    rows = [
        [group, str(num_people), str(num_scans), *(found[name].text() if found else "–" for name in shown)]
        for group, (num_scans, num_people, found) in _by_group(evaluation, evaluation.held_out.raw_N).items()
    ]
    if again := evaluation.retest:
        note = f"ICC {again.icc:.3f}, standard deviation within a person {again.within_sd:.2f} years"
        retest = f"Test–retest over {again.num_people} people with {again.num_scans} scans under a year apart: {note}."
    else:
        retest = "Fewer than four people were scanned twice within a year, so there is no test–retest figure."
    header = ["group", "people", "scans", *(LABELS[name] for name in shown)]
    page.section(
        "By sex, site and decade",
        f"Raw predictions. Groups of one to three people have no figures. {retest}",
        [table(header, rows)],
    )


def _by_group(evaluation: Evaluation, predicted_N: Array) -> dict[str, tuple[int, int, dict[str, Figure]]]:
    """Scans, people and figures of every sex, site and decade; who has none is in "n/a".

    Groups of fewer people than `FEWEST` have no figures.
    """
    groupings: dict[str, Sequence[str | None]] = {
        "sex": [scan.sex for scan in evaluation.scans],
        "site": [scan.site for scan in evaluation.scans],
        "age": [decade(age) for age in evaluation.held_out.age_N],
    }
    found = {}
    for title, group_N in groupings.items():
        named_N = np.array([group or "n/a" for group in group_N])
        for level in np.unique(named_N) if any(group_N) else ():
            rows = named_N == level
            people = len(set(np.array(evaluation.people)[rows]))
            own = evaluation.figures(predicted_N, rows) if people >= FEWEST else {}
            found[f"{title} {level}"] = (int(rows.sum()), people, own)
    return found


def _training(page: Page, evaluation: Evaluation, album: Album) -> None:
    outputs = evaluation.outputs
    ages = {part: outputs.ages_of(outputs.rows(0, part)).tolist() for part in ("train", "validation", "test")}
    title = f"Ages, {outputs.splits.fold_names[0]}."
    panels = [album.panel(pictures.age_histogram(ages), "ages", title, "People are split, not scans.")]
    for part in ("test", "validation"):
        curves = {name: points for name, points in _curves(evaluation, part) if points}
        if curves:
            panels.append(
                album.panel(
                    pictures.learning_curves(curves, f"MAE, {part} (years)"),
                    f"learning-{part}",
                    f"Learning curves, {part} people.",
                    "Chooses the network." if part == "validation" else "Written down, and used for no choice.",
                )
            )
    page.section("Training", "Every fold's own network, evaluated while it learnt.", [grid(panels)])


def _curves(evaluation: Evaluation, part: str) -> Iterator[tuple[str, list[tuple[float, float]]]]:
    epochs = int(evaluation.config["recipe"]["training"]["epochs"])
    for name in evaluation.outputs.splits.fold_names:
        lines = evaluation.judgements(name)
        last = max((line["step"] for line in lines), default=1)
        points = [(epochs * line["step"] / last, line[f"{part}_mae"]) for line in lines if f"{part}_mae" in line]
        yield name, points


def _mosaics(page: Page, evaluation: Evaluation) -> None:
    tested = evaluation.held_out
    order = np.argsort(-np.abs(tested.raw_N - tested.age_N))[:_MOST_SCANS]
    panels = []
    for row in order:
        scan = evaluation.scans[int(row)]
        volume = evaluation.cache.volume(scan)
        picture = Markup(
            f'<img src="{data_uri(pictures.mosaic(volume))}" alt="{escape(scan.key)}" style="display:block;width:100%">'
        )
        caption = f"{tested.age_N[row]:.0f} years, predicted {tested.raw_N[row]:.0f}; mask: {volume.mask_source}"
        panels.append(figure(picture, f"{scan.key}.", caption))
    page.section(
        "Scans, worst predictions first",
        "What the network saw: axial, coronal and sagittal, with the outline of the brain mask. A mask that cuts brain "
        "off, or keeps skull, explains many a bad prediction.",
        [grid(panels)],
    )


def _write_predictions(evaluation: Evaluation, path: Path) -> None:
    tested, folds = evaluation.held_out, evaluation.outputs.splits
    columns_N = {
        "brain_age": tested.raw_N,
        "brain_age_low": tested.low_N,
        "brain_age_high": tested.high_N,
        "brain_age_calibrated": tested.pooled_N,
        "brain_age_calibrated_sex": tested.by_sex_N,
        "gap": tested.raw_N - tested.age_N,
        "gap_calibrated": tested.pooled_N - tested.age_N,
        "gap_age_residualised": age_residualised_gap(tested.age_N, tested.raw_N),
    }
    rows = []
    for n, scan in enumerate(evaluation.scans):
        parts = zip(folds.fold_names, folds.parts[scan.participant_id], strict=True)
        rows.append(
            {
                "participant_id": scan.participant_id,
                "session_id": scan.session_id,
                "fold": ",".join(name for name, part in parts if part == "test"),
                "age": scan.age,
                "sex": scan.sex,
                "site": scan.site,
                **scan.columns,
                **{name: float(value_N[n]) for name, value_N in columns_N.items()},
                "mask_source": evaluation.cache.volume(scan).mask_source,
            }
        )
    write_table(path, rows)


def _write_metrics(evaluation: Evaluation, path: Path) -> None:
    rows = []
    for kind, predicted_N in evaluation.corrected().items():
        everybody = len(evaluation.scans), len(set(evaluation.people)), evaluation.figures(predicted_N)
        for group, (num_scans, num_people, found) in {"all": everybody, **_by_group(evaluation, predicted_N)}.items():
            row: dict[str, Any] = {"group": group, "prediction": kind, "num_scans": num_scans, "num_people": num_people}
            for name, value in found.items():
                row |= {name: value.value, f"{name}_low": value.low, f"{name}_high": value.high}
            rows.append(row)
    write_table(path, rows)
