"""The tables and descriptions of a phantom cohort."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ermoe.brain.data.phantom.people import Person
from ermoe.files import replacing

_README = """Synthetic T1-weighted scans of ageing brains. Nobody was scanned.

Made by `ermoe brain synthesize` from the ICBM152 tissue maps: an individual shape, ventricles that grow, cortex that
thins, lesions that come with age, and three scanners (sites A, B, C). The age effects are designed in, so a result on
these scans is a test of software and no evidence about brains.

derivatives/synth has the brain masks and the tissue maps, derivatives/truth what a scan truly shows: volumes and the
gap between brain age and age, which nothing else reveals.
"""

_COLUMNS = {
    "age": {"Description": "age at the first visit", "Units": "years"},
    "sex": {"Levels": {"M": "male", "F": "female"}},
    "site": {"Description": "simulated scanner, with its own blur, noise and intensity scale"},
    "icv": {"Description": "intracranial volume the head was made with", "Units": "mL"},
}

_TRUTH = {
    "age": {"Description": "age at the visit", "Units": "years"},
    "gap": {"Description": "brain age, which drives all ageing effects, minus age", "Units": "years"},
    "wm_ml": {"Description": "white matter", "Units": "mL"},
    "gm_ml": {"Description": "grey matter", "Units": "mL"},
    "csf_ml": {"Description": "cerebrospinal fluid, ventricles included", "Units": "mL"},
    "ventricle_percent": {"Description": "lateral ventricles in per cent of the intracranial volume"},
    "lesion_ml": {"Description": "white-matter lesions", "Units": "mL"},
}


def write_tables(root: Path, people: Sequence[Person], truth: Sequence[dict[str, Any]], *, has_sessions: bool) -> None:
    """Everything but images."""
    _text(root / "README", _README)
    _json(root / "participants.json", _COLUMNS)
    rows = [[p.participant_id, f"{p.visits[0].age:.2f}", p.sex, p.site, f"{p.icv_ml:.1f}"] for p in people]
    _table(root / "participants.tsv", ["participant_id", "age", "sex", "site", "icv"], rows)
    if has_sessions:
        for person in people:
            visits = [[str(visit.session_id), f"{visit.age:.2f}"] for visit in person.visits]
            path = root / person.participant_id / f"{person.participant_id}_sessions.tsv"
            _table(path, ["session_id", "age"], visits)
        _json(root / "sessions.json", {"age": {"Description": "age at the visit", "Units": "years"}})
    for name, purpose in (("synth", "masks and tissue maps"), ("truth", "what the scans truly show")):
        _json(root / "derivatives" / name / "dataset_description.json", _derivative(name, purpose))
        _text(
            root / "derivatives" / name / "README", f"Of a synthetic phantom cohort: {purpose}. Nobody was scanned.\n"
        )
    _write_truth(root / "derivatives" / "truth", truth, has_sessions=has_sessions)


def _write_truth(root: Path, truth: Sequence[dict[str, Any]], *, has_sessions: bool) -> None:
    """What each visit truly shows: a table of people, or of each person's sessions."""
    columns = [name for name in truth[0] if name not in ("participant_id", "session_id")]
    _json(
        root / ("sessions.json" if has_sessions else "phenotype/truth.json"), {name: _TRUTH[name] for name in columns}
    )
    by_person: dict[str, list[dict[str, Any]]] = {}
    for record in truth:
        by_person.setdefault(record["participant_id"], []).append(record)
    if not has_sessions:
        rows = [[person, *(str(first[name]) for name in columns)] for person, (first,) in by_person.items()]
        _table(root / "phenotype" / "truth.tsv", ["participant_id", *columns], rows)
        return
    _table(root / "participants.tsv", ["participant_id"], [[person] for person in by_person])
    for person, visits in by_person.items():
        rows = [[visit["session_id"], *(str(visit[name]) for name in columns)] for visit in visits]
        _table(root / person / f"{person}_sessions.tsv", ["session_id", *columns], rows)


def _derivative(name: str, purpose: str) -> dict[str, Any]:
    return {
        "Name": f"Synthetic phantom cohort: {purpose}",
        "BIDSVersion": "1.10.0",
        "DatasetType": "derivative",
        "License": "CC0",
        "GeneratedBy": [{"Name": f"ermoe-{name}"}],
    }


def _table(path: Path, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    _text(path, "".join("\t".join(row) + "\n" for row in [columns, *rows]))


def _json(path: Path, content: dict[str, Any]) -> None:
    _text(path, json.dumps(content, indent=2) + "\n")


def _text(path: Path, content: str) -> None:
    with replacing(path) as draft:
        draft.write_text(content, encoding="utf-8")
