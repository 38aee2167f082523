"""A phantom cohort as a BIDS data set that is marked synthetic."""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ermoe._version import __version__
from ermoe.brain.data.phantom.anatomy import VERSION, Anatomy, atlas, brain_mask_of, grow, scan_image
from ermoe.brain.data.phantom.people import Ageing, Person, Visit, draw_person
from ermoe.brain.data.tables import write_text, write_tsv
from ermoe.errors import UserError
from ermoe.files import replacing, write_json

_GRID_MM = (182.0, 218.0, 182.0)
_SHARE_LEVELS = 255


def synthesize(
    out: str | os.PathLike[str],
    subjects: int,
    seed: int = 0,
    *,
    confounded: bool = False,
    sessions: int | Sequence[int] = 1,
    ages: tuple[float, float] = (45.0, 90.0),
    spacing_mm: float = 2.0,
    ageing: Ageing = "everywhere",
    on_subject: Callable[[int, int], None] = lambda done, total: None,
) -> Path:
    """Writes the cohort and returns its root; people that are there already are not made again.

    Args:
        subjects: number of people. A larger number later adds people and changes nobody.
        confounded: old people are scanned at other sites than young ones.
        sessions: visits of everybody, or the numbers to draw from, for example (1, 2, 3); a year or two apart.
        ages: youngest and oldest at the first visit.
        spacing_mm: edge of the voxels.
        ageing: "everywhere", or "frontal": age shows in the front of the brain alone, and no share of tissue in the
            whole brain follows it.
        on_subject: called with (done, total) after each person.
    """
    counts = (sessions,) if isinstance(sessions, int) else tuple(sessions)
    _refuse_nonsense(subjects, counts, ages, spacing_mm, ageing)
    root = Path(out)
    recipe = {
        "seed": seed,
        "confounded": confounded,
        "sessions": list(counts),
        "ages": list(map(float, ages)),
        "spacing_mm": spacing_mm,
        "anatomy": VERSION,
    }
    recipe |= {} if ageing == "everywhere" else {"ageing": ageing}
    _claim(root, recipe)
    drawn = partial(draw_person, seed=seed, ages=ages, sessions=counts, confounded=confounded, ageing=ageing)
    people = [drawn(index) for index in range(subjects)]
    truth = []
    for done, person in enumerate(people, start=1):
        truth += [_visit(root, person, visit, spacing_mm) for visit in person.visits]
        on_subject(done, subjects)
    _write_tables(root, people, truth, has_sessions=people[0].visits[0].session_id is not None)
    return root


def _refuse_nonsense(
    subjects: int, sessions: tuple[int, ...], ages: tuple[float, float], spacing_mm: float, ageing: str
) -> None:
    if not 1 <= subjects <= 9999:
        raise UserError(f"subjects={subjects}: need 1 to 9999")
    if not sessions or min(sessions) < 1:
        raise UserError(f"sessions={sessions}: need at least one visit a person")
    if not 18 <= ages[0] <= ages[1] <= 95:
        raise UserError(f"ages={ages}: need youngest and oldest between 18 and 95, where the ageing curves hold")
    if ageing not in get_args(Ageing):
        raise UserError(f"ageing={ageing!r}: use one of {', '.join(get_args(Ageing))}")
    if not 1 <= spacing_mm <= 8:
        raise UserError(f"spacing_mm={spacing_mm}: need 1 to 8 mm")


def _claim(root: Path, recipe: Mapping[str, Any]) -> None:
    """Marks an empty folder as ours; a folder of another recipe, or of somebody else, is left alone."""
    path = root / "dataset_description.json"
    description = {
        "Name": "Synthetic phantom cohort of ageing brains (no real people)",
        "BIDSVersion": "1.10.0",
        "DatasetType": "raw",
        "License": "CC0",
        "Authors": ["ermoe brain synthesize"],
        "GeneratedBy": [{"Name": "ermoe brain synthesize", "Version": __version__, "Description": json.dumps(recipe)}],
        "HowToAcknowledge": "Built from the ICBM152 2009 tissue maps of the Montreal Neurological Institute.",
    }
    if path.is_file():
        known = json.loads(path.read_text()).get("GeneratedBy", [{}])[0].get("Description")
        if known != json.dumps(recipe):
            raise UserError(f"{root} holds a data set of another recipe ({known}): choose another folder, or delete it")
    elif root.is_dir() and any(root.iterdir()):
        raise UserError(f"{root} is not empty: choose a new folder")
    write_json(path, description)


def _visit(root: Path, person: Person, visit: Visit, spacing_mm: float) -> dict[str, Any]:
    """Makes the images of a visit unless they are there, and returns what they truly show."""
    name = "_".join(part for part in (person.participant_id, visit.session_id) if part)
    folder = Path(person.participant_id, visit.session_id or ".", "anat")
    t1 = root / folder / f"{name}_T1w.nii.gz"
    maps = root / "derivatives" / "synth" / folder
    record = maps / f"{name}_desc-brain_mask.json"
    if t1.is_file() and record.is_file():
        return json.loads(record.read_text())["Truth"]
    x, y, z = (round(edge / spacing_mm) for edge in _GRID_MM)
    anatomy = grow(atlas(), person, visit, shape=(x, y, z), spacing_mm=spacing_mm)
    image = scan_image(anatomy, person, visit, spacing_mm=spacing_mm)
    for tissue, share in anatomy.tissues().items():
        levels = np.rint(np.clip(share, 0, 1) * _SHARE_LEVELS).astype(np.uint8)
        _write(maps / f"{name}_label-{tissue.upper()}_probseg.nii.gz", levels, anatomy.affine, slope=1 / _SHARE_LEVELS)
    _write(maps / f"{name}_desc-brain_mask.nii.gz", brain_mask_of(anatomy).astype(np.uint8), anatomy.affine)
    truth = _truth(anatomy, person, visit, spacing_mm)
    write_json(record, {"Type": "Brain", "Truth": truth})
    _write(t1, image, anatomy.affine)  # last, because it marks the visit as complete
    return truth


def _truth(anatomy: Anatomy, person: Person, visit: Visit, spacing_mm: float) -> dict[str, Any]:
    voxel_ml = spacing_mm**3 / 1000
    return {
        "participant_id": person.participant_id,
        "session_id": visit.session_id or "n/a",
        "age": visit.age,
        "gap": round(visit.brain_age - visit.age, 3),
        **{f"{name}_ml": round(float(share.sum()) * voxel_ml, 2) for name, share in anatomy.tissues().items()},
        "ventricle_percent": round(visit.ventricle_percent, 3),
        "lesion_ml": round(visit.lesion_ml, 3),
    }


def _write(path: Path, data: NDArray[Any], affine: NDArray[np.float64], *, slope: float = 1.0) -> None:
    import nibabel

    image = nibabel.Nifti1Image(data, affine)
    image.header.set_xyzt_units("mm", "sec")
    image.set_sform(affine, 1)
    image.set_qform(affine, 1)
    if slope != 1.0:
        image.header.set_slope_inter(slope, 0)
    with replacing(path) as draft:
        # Without a time in the gzip header equal phantoms are equal files.
        draft.write_bytes(gzip.compress(image.to_bytes(), compresslevel=3, mtime=0))


def _shipped(name: str) -> str:
    """A text of the data set that is the same for every cohort."""
    return (files("ermoe.brain.data.phantom") / name).read_text("utf-8")


_TRUTH: dict[str, dict[str, str]] = json.loads(_shipped("truth.json"))
"""Columns of what a scan truly shows."""


def _write_tables(root: Path, people: Sequence[Person], truth: Sequence[dict[str, Any]], *, has_sessions: bool) -> None:
    """Everything but images."""
    for name in ("README", "participants.json"):
        write_text(root / name, _shipped(name))
    rows = [[p.participant_id, f"{p.visits[0].age:.2f}", p.sex, p.site, f"{p.icv_ml:.1f}"] for p in people]
    write_tsv(root / "participants.tsv", ["participant_id", "age", "sex", "site", "icv"], rows)
    if has_sessions:
        for person in people:
            visits = [[str(visit.session_id), f"{visit.age:.2f}"] for visit in person.visits]
            write_tsv(_sessions(root, person.participant_id), ["session_id", "age"], visits)
        write_json(root / "sessions.json", {"age": _TRUTH["age"]})
    for name, purpose in (("synth", "masks and tissue maps"), ("truth", "what the scans truly show")):
        folder = root / "derivatives" / name
        description = {
            "Name": f"Synthetic phantom cohort: {purpose}",
            "BIDSVersion": "1.10.0",
            "DatasetType": "derivative",
            "License": "CC0",
            "GeneratedBy": [{"Name": f"ermoe-{name}"}],
        }
        write_json(folder / "dataset_description.json", description)
        write_text(folder / "README", f"Of a synthetic phantom cohort: {purpose}. Nobody was scanned.\n")
    _write_truth(root / "derivatives" / "truth", truth, has_sessions=has_sessions)


def _sessions(root: Path, participant_id: str) -> Path:
    return root / participant_id / f"{participant_id}_sessions.tsv"


def _write_truth(root: Path, truth: Sequence[dict[str, Any]], *, has_sessions: bool) -> None:
    """What each visit truly shows: a table of people, or of each person's sessions."""
    by_person: dict[str, list[list[str]]] = {}
    for record in truth:
        first = record["session_id"] if has_sessions else record["participant_id"]
        row = [first, *(str(record[name]) for name in _TRUTH)]
        by_person.setdefault(record["participant_id"], []).append(row)
    if not has_sessions:
        write_json(root / "phenotype" / "truth.json", _TRUTH)
        rows = [row for rows in by_person.values() for row in rows]
        write_tsv(root / "phenotype" / "truth.tsv", ["participant_id", *_TRUTH], rows)
        return
    write_json(root / "sessions.json", _TRUTH)
    write_tsv(root / "participants.tsv", ["participant_id"], [[person] for person in by_person])
    for person, rows in by_person.items():
        write_tsv(_sessions(root, person), ["session_id", *_TRUTH], rows)
