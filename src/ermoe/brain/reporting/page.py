"""One HTML report of a run, inside a BIDS derivative with its tables, figures and model card."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ermoe.analysis.page import Markup, Page, data_uri, escape, figure, grid, table
from ermoe.brain.ages import age_residualised_gap
from ermoe.brain.data.tables import write_text
from ermoe.brain.evaluation import Evaluation
from ermoe.brain.metrics import LABELS, Array, Figure, decade
from ermoe.brain.reporting import pictures
from ermoe.brain.reporting.derivative import RESEARCH_USE, describe, model_card, write_table
from ermoe.brain.reporting.pictures import Album
from ermoe.brain.reporting.routing_sections import routing_sections
from ermoe.train.compute import Compute

_FLAT = 0.5
"""Slope of predicted against chronological age below which a report begins with it."""
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
    name = f"Brain age of {evaluation.model.facts['data']}, {evaluation.method}"
    readme = "Predictions of held-out people: desc-heldout_brainage.tsv; their errors: desc-metrics_brainage.tsv."
    describe(folder, name=name, source=evaluation.config["data"]["path"], readme=readme)
    _write_predictions(evaluation, folder / "desc-heldout_brainage.tsv")
    _write_metrics(evaluation, folder / "desc-metrics_brainage.tsv")
    known = _warnings(evaluation)
    card = model_card(evaluation.model, warnings=known)
    write_text(folder / "model-card.md", card.markdown())
    album = Album(folder / "figures")
    page = Page(name, lead=RESEARCH_USE, facts=_facts(evaluation))
    if known:
        page.section("Read this first", "What to know before the figures below.", [_list(known)])
    _accuracy(page, evaluation)
    _calibration(page, evaluation, album)
    _groups(page, evaluation)
    _training(page, evaluation, album)
    routing_sections(page, evaluation, album, occlusion_scans=occlusion_scans, compute=compute)
    _mosaics(page, evaluation)
    headed = ((Markup(f"<h3>{escape(heading)}</h3>"), _list(said)) for heading, said in card.sections.items())
    statements = [part for pair in headed for part in pair]
    page.section("Model card", f"{RESEARCH_USE} In the same words as model-card.md.", statements)
    return page.write(folder / "report.html")


def _warnings(evaluation: Evaluation) -> list[str]:
    """Sentences a reader must not miss."""
    found = list(evaluation.confounds)
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


def _facts(evaluation: Evaluation) -> dict[str, str]:
    age_N = evaluation.held_out.age_N
    mae = evaluation.figures(evaluation.held_out.raw_N)["mae"]
    return {
        "people": str(len(set(evaluation.people))),
        "scans": str(len(evaluation.scans)),
        "age": f"{age_N.mean():.1f} ± {age_N.std():.1f} ({age_N.min():.0f}–{age_N.max():.0f})",
        "split": f"{evaluation.outputs.splits.kind}, {evaluation.outputs.splits.num_folds}",
        "raw MAE": f"{mae.text()} years",
    }


def _accuracy(page: Page, evaluation: Evaluation) -> None:
    levels = evaluation.levels
    header = ["estimate", "r", *(f"MAE, {name} ({int(rows.sum())})" for name, rows in levels.items())]
    rows = []
    for name, predicted_N in evaluation.estimates.items():
        found = [evaluation.figures(predicted_N, wanted) for wanted in levels.values()]
        rows.append([name, found[0]["r"].text(), *(own["mae"].text() for own in found)])
    differences = [
        [f"{evaluation.method} − {other}", *(evaluation.difference(other, wanted).text() for wanted in levels.values())]
        for other in evaluation.estimates
        if other != evaluation.method
    ]
    page.section(
        "How far off",
        "Raw predictions of people whom the judging networks had not learnt from; years, with 95 % intervals over "
        "resampled people. All rows use the same folds. Within one site or batch, a label tells only its mean age.",
        [table(header, rows, strong=evaluation.method)],
    )
    page.section(
        "Against the simple estimates",
        "Difference of the mean absolute errors over the same people; below zero the network is better.",
        [table(["difference", *levels], differences)],
    )


def _calibration(page: Page, evaluation: Evaluation, album: Album) -> None:
    tested, corrected = evaluation.held_out, evaluation.corrected()
    found = {name: evaluation.figures(predicted_N) for name, predicted_N in corrected.items()}
    rows = [[name, *(own[label].text() for label in LABELS)] for name, own in found.items()]
    sexes = [scan.sex for scan in evaluation.scans]
    panels = []
    for sex in dict.fromkeys(sorted(sexes, key=str)):
        own = np.array([other == sex for other in sexes])
        drawing = pictures.scatter(tested.age_N[own], tested.raw_N[own], sex)
        panels.append(album.panel(drawing, f"scatter-{sex or 'unknown'}", "Raw predictions.", "One point a scan."))
    panels.append(
        album.panel(
            pictures.gap_against_age(tested.age_N, corrected),
            "gap-against-age",
            "Gap against age.",
            "Predictions tend to the mean, so the raw gap falls with age; calibration turns it, and adds noise.",
        )
    )
    coverage = "" if np.isnan(tested.coverage) else f" The 90 % intervals held {tested.coverage:.0%} of the ages."
    page.section(
        "Predicted against chronological age",
        "The headline is the raw row. Calibrated predictions are (raw − a) / b; a and b come from people of other "
        f"folds or of validation, so no age corrects itself.{coverage}",
        [table(["prediction", *LABELS.values()], rows, strong="raw"), grid(panels)],
    )


def _groups(page: Page, evaluation: Evaluation) -> None:
    shown = ("mae", "r", "gap_age_r", "slope", "bias")
    rows = [
        [group, str(num_people), str(num_scans), *(found[name].text() for name in shown)]
        for group, (num_scans, num_people, found) in _by_group(evaluation, evaluation.held_out.raw_N).items()
    ]
    if again := evaluation.retest:
        note = f"ICC {again.icc:.3f}, standard deviation within a person {again.within_sd:.2f} years"
        retest = f"Test–retest over {again.num_people} people with {again.num_scans} scans under a year apart: {note}."
    else:
        retest = "Nobody was scanned twice within a year, so there is no test–retest figure."
    header = ["group", "people", "scans", *(LABELS[name] for name in shown)]
    page.section("By sex, site and decade", f"Raw predictions. {retest}", [table(header, rows)])


def _by_group(evaluation: Evaluation, predicted_N: Array) -> dict[str, tuple[int, int, dict[str, Figure]]]:
    """Scans, people and figures of every sex, site and decade; who has none is in "n/a"."""
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
            found[f"{title} {level}"] = (int(rows.sum()), people, evaluation.figures(predicted_N, rows))
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


def _list(lines: list[str]) -> Markup:
    return Markup("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>")
