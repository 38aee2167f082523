"""Reports of predictions: one page of all scans, flagged ones first, and one a scan that can be looked through.

Letters: X, Y, Z voxels, x, y, z cubes, F measures.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import ndimage

from ermoe.analysis.page import Markup, Page, bullets, data_uri, escape, figure, grid, table
from ermoe.brain.ages import POOLED
from ermoe.brain.data.preprocess import Volume
from ermoe.brain.data.scans import Scan
from ermoe.brain.inputs import network_input, voxels
from ermoe.brain.likeness import signs_of
from ermoe.brain.measures import MEASURES
from ermoe.brain.metrics import FEWEST, LABELS, Array, bootstrap
from ermoe.brain.model import BrainAgeModel, Prediction
from ermoe.brain.recipes import reduction
from ermoe.brain.reporting import pictures
from ermoe.brain.reporting.derivative import RESEARCH_USE
from ermoe.brain.reporting.methods import numbers, paragraph
from ermoe.brain.reporting.pictures import Album
from ermoe.brain.reporting.routing_sections import EXPLAINS, changes_without_cubes
from ermoe.errors import library

_NAMED = 5
"""Scans that are named where many have the same flag."""
_ALIKE = 5.0
_FLAT = 0.8  # slope of a calibration, below which its ages stretch what another scanner adds as well
"""Years within which all predictions of people of unknown ages are suspicious."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A scan, what a model says of it, and the name of its page."""

    scan: Scan
    row: Prediction
    page: str

    @classmethod
    def all(cls, scans: Sequence[Scan], rows: Sequence[Prediction]) -> list[Judged]:
        """In the order of the scans; pages of scans with one name are numbered."""
        found: list[Judged] = []
        for scan, row in zip(scans, rows, strict=True):
            name = re.sub(r"[^\w.-]", "_", scan.key).lstrip(".") or "scan"
            again = sum(other.scan.key == scan.key for other in found)
            found.append(cls(scan, row, f"{name}_{again + 1}.html" if again else f"{name}.html"))
        return found

    @property
    def is_flagged(self) -> bool:
        """Whether something is to be known before the age is used."""
        return bool(self.row.problem or self.row.flags)

    def in_words(self) -> str:
        """Its age, its interval, and what to know of it."""
        if self.row.problem:
            return f"no prediction: {self.row.problem}"
        known = "" if math.isnan(self.row.age) else f", is {self.row.age:.1f}"
        return "; ".join([f"predicted {_with_limits(self.row)} years{known}", *self.row.flags])


def report_of_people(
    folder: Path,
    title: str,
    model: BrainAgeModel,
    judged: Sequence[Judged],
    read: Callable[[Scan], Volume],
    command: str,
) -> Path:
    """Writes ``report.html`` and a page of every scan that was predicted; returns the path of the first."""
    volumes = {one.page: read(one.scan) for one in judged if not one.row.problem}
    for one in judged:
        if not one.row.problem:
            page_of_scan(folder, model, one, volumes[one.page])
    page = Page(title, lead=RESEARCH_USE, facts=_facts(judged))
    if known := [*_about_model(model), *_warnings(judged)]:
        page.section("Read this first", "What to know before an age is used.", [bullets(known)])
    _errors(page, judged, Album(folder / "figures"))
    order = sorted(judged, key=lambda one: (not one.row.problem, not one.is_flagged, -_number(one.row.distance)))
    page.section(
        "Scans, flagged ones first",
        "What the model saw: axial, coronal and sagittal, with the outline of the brain mask. Each leads to a page to "
        "look through.",
        [grid([_panel(one, volumes.get(one.page)) for one in order])],
    )
    methods_section(page, model, command)
    page.contents()
    return page.write(folder / "report.html")


def methods_section(page: Page, model: BrainAgeModel, command: str) -> None:
    """The numbers of a model and the paragraph to paste."""
    text = Markup(f"<p>{escape(paragraph(model, command))}</p>")
    page.section("Methods", "To paste into a paper.", [text, table(["number", ""], numbers(model).items())])


def _facts(judged: Sequence[Judged]) -> dict[str, str]:
    ages = [one.row.brain_age for one in judged if not one.row.problem]
    spread = {"predicted": f"{min(ages):.1f} to {max(ages):.1f} years"} if ages else {}
    flagged = sum(one.is_flagged for one in judged)
    return {
        "scans": str(len(judged)),
        "without a prediction": str(len(judged) - len(ages)),
        "flagged": str(flagged),
    } | spread


def _warnings(judged: Sequence[Judged]) -> list[str]:
    found = [f"{one.scan.key}: {one.in_words()}" for one in judged if one.row.problem]
    flagged: dict[str, list[str]] = {}
    for one in judged:
        for flag in one.row.flags:
            flagged.setdefault(flag, []).append(one.scan.key)
    for flag, keys in flagged.items():
        more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
        found.append(f"{', '.join(keys[:_NAMED])}{more}: {flag}")
    ages = [one.row.brain_age for one in judged if not one.row.problem]
    if len(ages) >= FEWEST:
        within = max(ages) - min(ages)
        doubt = ": if these people are of different ages, the model does not see their age" if within < _ALIKE else ""
        found.append(f"all {len(ages)} predictions lie within {within:.1f} years{doubt}")
    return found


def _about_model(model: BrainAgeModel) -> list[str]:
    """What holds for every scan."""
    found = []
    if model.recalibration is not None:
        found.append(
            f"this model was {model.recalibration.in_words()}; ages and intervals below are raw, the column "
            "brain_age_recalibrated has the others"
        )
    if model.calibration is not None and (slope := model.calibration.lines[POOLED].slope) < _FLAT:
        found.append(
            f"calibrated ages stretch differences by {1 / slope:.1f}, as people of the training scanners need: on "
            "another scanner they are further off than raw ones; use ermoe brain recalibrate there"
        )
    return found


def _errors(page: Page, judged: Sequence[Judged], album: Album) -> None:
    """Where ages are known of people enough."""
    known = [one for one in judged if not one.row.problem and not math.isnan(one.row.age)]
    people = [one.scan.participant_id for one in known]
    if len(set(people)) < FEWEST:
        return
    age_N, raw_N = (np.array([getattr(one.row, name) for one in known]) for name in ("age", "brain_age"))
    predictions = {"raw": raw_N, "calibrated": _column(known, "brain_age_calibrated")}
    predictions["recalibrated"] = _column(known, "brain_age_recalibrated")
    found = {
        name: bootstrap(people, age_N, values_N)
        for name, values_N in predictions.items()
        if not np.isnan(values_N).any()
    }
    rows = [[title, *(own[name].text() for own in found.values())] for name, title in LABELS.items()]
    drawing = pictures.scatter(age_N, raw_N, [one.scan.site or one.scan.sex or "scans" for one in known])
    page.section(
        "Errors",
        f"Of {len(known)} scans of known age, with 95 % intervals over resampled people.",
        [
            grid([album.panel(drawing, "scatter", "Raw predictions.", "One point a scan.")]),
            table(["figure", *found], rows),
        ],
    )


def _column(judged: Sequence[Judged], name: str) -> Array:
    return np.array([getattr(one.row, name) for one in judged], dtype=np.float64)


def _panel(one: Judged, volume: Volume | None) -> Markup:
    if volume is None:
        return figure(Markup(""), f"{one.scan.key}.", one.in_words())
    picture = data_uri(pictures.mosaic(volume))
    linked = Markup(
        f'<a href="{escape(one.page)}"><img src="{picture}" alt="{escape(one.scan.key)}" '
        'style="display:block;width:100%"></a>'
    )
    return figure(linked, f"{one.scan.key}.", one.in_words())


def page_of_scan(folder: Path, model: BrainAgeModel, one: Judged, volume: Volume) -> Path:
    """A page with a view of the scan to look through, and what its age comes from."""
    row = one.row
    facts = {"predicted": f"{_with_limits(row)} years", "distance": f"{row.distance:.2f}", "mask": str(row.mask_source)}
    facts |= {} if math.isnan(row.age) else {"age": f"{row.age:.1f}", "gap": f"{row.gap:+.1f}"}
    page = Page(f"Brain age of {one.scan.key}", lead=RESEARCH_USE, facts=facts)
    if row.flags:
        page.section("Read this first", "What to know before the age is used.", [bullets(row.flags)])
    change_xyz = _occluded(model, one.scan, volume)
    strongest = 0.0 if change_xyz is None else float(np.nanmax(np.abs(change_xyz)))
    if change_xyz is None:
        said = "The network is believed in nothing here, so no map of it explains this age; the ridge alone answers."
    elif strongest < EXPLAINS:
        said = f"Hiding any one cube changes the age by at most {strongest:.1f} years: a map would explain nothing."
    else:
        said = (
            f"Colours: years by which the age changes when a cube is hidden, at most {strongest:.1f}. Red: without it "
            "the brain looks older."
        )
    shown = change_xyz if strongest >= EXPLAINS else None
    page.section("Scan", f"Click or drag to move through it. {said}", [_view(volume, shown, model.patch_size)])
    if model.ridges:
        page.section(
            "What the ridge sees",
            "Years that each measure of the scan adds to the mean age in training; together they are the ridge's age.",
            [table(["measure", "years"], _contributions(model, one.scan, volume))],
        )
    return page.write(folder / one.page)


def _contributions(model: BrainAgeModel, scan: Scan, volume: Volume) -> list[list[str]]:
    """(measure, years), the largest first, as the mean over the folds that judged."""
    measure_F = signs_of(volume, model.preprocessing.spacing_mm)[: len(MEASURES)]
    folds = model.folds_for(scan.participant_id)[0]
    ridges = [model.ridges[fold] for fold in folds]
    years_F = np.mean([(measure_F - own.mean) / own.scale * own.weight for own in ridges], axis=0)
    mean = float(np.mean([own.intercept for own in ridges]))
    order = np.argsort(-np.abs(years_F), kind="stable")
    added = [[MEASURES[place].replace("_", " "), f"{years_F[place]:+.1f}"] for place in order]
    pairs = [(model.own_ridges[fold], model.ridges[fold]) for fold in folds if fold in model.own_ridges]
    own = [float(own.added(ridge, measure_F[None], [scan])[0]) for own, ridge in pairs]
    scanner = [["the ridge of its own scanner", f"{np.mean(own):+.1f}"]] if any(own) else []
    return [["mean age in training", f"{mean:.1f}"], *added, *scanner]


def _occluded(model: BrainAgeModel, scan: Scan, volume: Volume) -> Array | None:
    """Years by which hiding each cube changes the age, by a network that may judge the person; None if not believed."""
    fold = model.folds_for(scan.participant_id)[0][0]
    worth = model.worth(fold, scan.participant_id)
    if not model.networks or not worth:
        return None
    seen_CXYZ, mask_XYZ = network_input(model.input, *voxels(volume))
    network, edge = model.networks[fold], model.patch_size // reduction(model.input)
    device = next(network.parameters()).device
    seen_BCXYZ, mask_BXYZ = seen_CXYZ.unsqueeze(0).to(device), mask_XYZ.unsqueeze(0).to(device)
    return worth * changes_without_cubes(network, model.head, seen_BCXYZ, mask_BXYZ, edge)


def _view(volume: Volume, change_xyz: Array | None, patch_size: int) -> Markup:
    """Three slices that follow the pointer: the T1, and on it the map in its cubes, or the mask's outline."""
    import nibabel

    plotting: Any = library("nilearn.plotting", "views of scans need nilearn", "brain")
    mask_XYZ, affine = np.asarray(volume.mask_XYZ), np.asarray(volume.affine, dtype=np.float64)
    outline_XYZ = (mask_XYZ & ~ndimage.binary_erosion(mask_XYZ)).astype(np.float32)
    over_XYZ, look = outline_XYZ, {"cmap": "autumn", "colorbar": False, "threshold": 0.5, "symmetric_cmap": False}
    if change_xyz is not None:
        full_XYZ = pictures.in_cubes(change_xyz, mask_XYZ.shape, patch_size)
        over_XYZ = np.where(mask_XYZ, np.nan_to_num(full_XYZ), 0).astype(np.float32)
        look = {"cmap": "RdBu_r", "colorbar": True, "threshold": 1e-6, "symmetric_cmap": True}
    t1 = nibabel.Nifti1Image(np.array(volume.t1_XYZ, dtype=np.float32), affine)
    view = plotting.view_img(
        nibabel.Nifti1Image(over_XYZ, affine),
        bg_img=t1,
        cut_coords=(affine @ [*np.argwhere(mask_XYZ).mean(0), 1])[:3],
        resampling_interpolation="nearest",
        black_bg=True,
        opacity=0.6,
        **look,
    )
    # The page asks nobody for anything, and no icon is seen inside it.
    content = re.sub(r"<link\s[^>]*rel=\"icon\"[^>]*>", "", view.html)
    return Markup(
        f'<iframe srcdoc="{html.escape(content)}" title="Scan, three slices" '
        'style="width:100%;aspect-ratio:2.1;min-height:14rem;border:0"></iframe>'
    )


def _with_limits(row: Prediction) -> str:
    limits = "" if math.isnan(row.brain_age_low) else f" [{row.brain_age_low:.1f}, {row.brain_age_high:.1f}]"
    return f"{row.brain_age:.1f}{limits}"


def _number(value: float) -> float:
    return 0.0 if math.isnan(value) else value
