"""Predictions of a data set as a BIDS derivative: all at once, or person by person and then gathered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from ermoe.brain.data.cache import Archive, VolumeCache
from ermoe.brain.data.preprocess import Volume
from ermoe.brain.data.scans import Scan
from ermoe.brain.data.tables import read_table, write_text
from ermoe.brain.likeness import kept_signs
from ermoe.brain.model import BrainAgeModel, Prediction, predict
from ermoe.errors import UserError
from ermoe.train.compute import Compute

_TABLE = "desc-predictions_brainage.tsv"


@dataclass(frozen=True, slots=True)
class Predictor:
    """A model, the place it came from, and the cache its scans are prepared in."""

    model: BrainAgeModel
    place: Path
    cache: VolumeCache
    workers: int = 0

    @classmethod
    def at(cls, folder: Path, cache: Path | None, compute: Compute) -> Predictor:
        """The model in a folder; what is prepared is kept in ``cache``, by default among the user's caches."""
        model = BrainAgeModel.load(folder, compute.device)
        return cls(model, folder, Archive.at(cache).volumes(model.preprocessing), compute.workers)

    def rows(self, scans: Sequence[Scan]) -> Iterator[Prediction]:
        """Of every scan, as it is ready."""
        # Tissue maps are of no use to a prediction, and must not be able to spoil it.
        plain = [replace(scan, tissue=None) for scan in scans]
        signs = partial(kept_signs, self.cache)
        return predict(self.model, plain, read=self.cache.volume, signs=signs, workers=self.workers)

    def write(
        self, folder: Path, scans: Sequence[Scan], rows: Sequence[Prediction], command: str, *, with_pages: bool = True
    ) -> Path:
        """The derivative of all at once; returns the path of its table, or of its report."""
        from ermoe.brain.reporting.derivative import write_table

        self._describe(folder, len(rows))
        write_table(folder / _TABLE, [asdict(row) for row in rows])
        return self._report(folder, scans, rows, command) if with_pages else folder / _TABLE

    def one_by_one(self, folder: Path, scans: Sequence[Scan], *, data: Path) -> Iterator[Prediction]:
        """A folder with a table for every session, and a page for every scan."""
        from ermoe.brain.reporting.derivative import write_table
        from ermoe.brain.reporting.people import Judged, page_of_scan

        self._describe(folder, len(scans), data)
        for scan, row in zip(scans, self.rows(scans), strict=True):
            write_table(_table_of(folder, scan), [asdict(row)])
            if not row.problem:
                (one,) = Judged.all([scan], [row])
                page_of_scan(folder, self.model, one, _read(self.cache, scan))
            yield row

    def gather(self, folder: Path, scans: Sequence[Scan], command: str, *, data: Path) -> Path:
        """What `one_by_one` wrote of these scans, in one table and one report; returns the path of the report."""
        from ermoe.brain.reporting.derivative import refuse_foreign, write_table
        from ermoe.brain.reporting.methods import paragraph

        refuse_foreign(folder, self.model.name)
        done = [scan for scan in scans if _table_of(folder, scan).is_file()]
        if not done:
            raise UserError(f"{folder} holds no predictions of these people: run the level participant first")
        rows = [_stored(_table_of(folder, scan)) for scan in done]
        self._describe(folder, len(rows), data)
        write_table(folder / _TABLE, [asdict(row) for row in rows])
        write_text(folder / "logs" / "CITATION.md", paragraph(self.model, command) + "\n")
        return self._report(folder, done, rows, command)

    def _describe(self, folder: Path, number: int, data: Path | None = None) -> None:
        from ermoe.brain.reporting.derivative import describe

        readme = f"Predictions of {number} scans by the model {self.place.name}, in {_TABLE}."
        source = None if data is None else str(data)
        describe(folder, name="Brain age predictions", data=source, readme=readme, by=self.model.name)

    def _report(self, folder: Path, scans: Sequence[Scan], rows: Sequence[Prediction], command: str) -> Path:
        from ermoe.brain.reporting.people import Judged, report_of_people

        title = f"Brain age of {len(rows)} scans"
        return report_of_people(folder, title, self.model, Judged.all(scans, rows), partial(_read, self.cache), command)


def _read(cache: VolumeCache, scan: Scan) -> Volume:
    """A prepared scan; tissue maps are of no use to a prediction, and must not be able to spoil it."""
    return cache.volume(replace(scan, tissue=None))


def _table_of(folder: Path, scan: Scan) -> Path:
    below = folder / scan.participant_id
    return (below / scan.session_id if scan.session_id else below) / f"{scan.key}_brainage.tsv"


def _stored(path: Path) -> Prediction:
    """The row that a table of one scan holds."""
    (cells,) = read_table(path).rows
    known: dict[str, Any] = {}
    for own in fields(Prediction):
        cell = cells.get(own.name, "n/a")
        if own.type == "float":
            known[own.name] = float("nan") if cell == "n/a" else float(cell)
        elif own.type in ("int", "bool"):
            known[own.name] = cell == "true" if own.type == "bool" else int(cell)
        else:
            known[own.name] = cell if cell != "n/a" else (None if "None" in str(own.type) else "")
    return Prediction(**known)
