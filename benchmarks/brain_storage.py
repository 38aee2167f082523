"""Does a brain age change when the same scan is stored otherwise? And by how much when the head lies otherwise?

Real scans are written in other orders of axes, uncompressed, as integers, scaled and padded: nothing may change. Then
the head is shifted, tilted, and copied to 1 mm, and its brain is cut out by deepbet instead of its labels: the median
change is reported. One prediction in a process of its own gives time and memory.

    python benchmarks/brain_storage.py RUN DATA [--people 10]

RUN is a folder of `ermoe brain train`, DATA a BIDS set with labels. Adds a line to benchmarks/results/bench.jsonl.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import nibabel
import numpy as np
import tyro
from nibabel.orientations import axcodes2ornt, io_orientation, ornt_transform
from nibabel.processing import resample_to_output
from rich.progress import track

import ermoe
from ermoe.brain.data.cohort import open_cohort
from ermoe.brain.data.preprocess import has_deepbet
from ermoe.brain.data.scans import Scan
from ermoe.brain.model import predict
from ermoe.studies.record import add_records, new_record

LIMIT_YEARS = 0.01
STORED = ("LAS", "IPL", "SRA", ".nii", "int16", "scaled", "padded")
"""Ways that must change nothing; the others move the head or interpolate."""
Image = nibabel.Nifti1Image


@dataclass(frozen=True)
class Options:
    """Predict the age of scans as they are, stored otherwise, and moved."""

    run: Annotated[Path, tyro.conf.Positional]
    data: Annotated[Path, tyro.conf.Positional]
    people: int = 10
    out: Path = Path(__file__).parent / "results"


def main() -> None:
    options = tyro.cli(Options)
    model = ermoe.brain.load(options.run).model
    scans = open_cohort(options.data).scans
    scans = scans[:: max(1, len(scans) // options.people)][: options.people]
    change: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for scan in track(scans, "predicting", transient=True):
            ways = dict(all_ways(scan, Path(folder)))
            rows = predict(model, [scan, *ways.values()])
            reference, *others = (row.brain_age for row in rows)
            for name, age in zip(ways, others, strict=True):
                change.setdefault(name, []).append(abs(age - reference))
    seconds, megabytes = one_prediction(options.run, scans[0])
    largest = {name: round(max(values), 4) for name, values in change.items() if name in STORED}
    figures = {
        "people": len(scans),
        "largest_change_years": largest,
        "holds": max(largest.values()) < LIMIT_YEARS,
        "median_change_years": {n: round(float(np.median(v)), 3) for n, v in change.items() if n not in STORED},
        "one_prediction": {"seconds": round(seconds, 1), "peak_megabytes": round(megabytes)},
    }
    record = new_record("bench", "brain_storage", settings={}, figures=figures)
    add_records(options.out / "bench.jsonl", record)
    print(json.dumps(record, indent=1, ensure_ascii=False))


def all_ways(scan: Scan, folder: Path) -> Iterator[tuple[str, Scan]]:
    """The same head, stored in ways that change nothing, and moved."""
    assert scan.labels is not None, f"{scan.participant_id} has no labels"
    t1, labels = nibabel.load(scan.t1), nibabel.load(scan.labels)

    def written(name: str, own: Image, own_labels: Image, suffix: str = ".nii.gz") -> tuple[str, Scan]:
        places = [folder / f"{name}_{kind}{suffix}" for kind in ("T1w", "dseg")]
        nibabel.save(own, places[0])
        nibabel.save(own_labels, places[1])
        return name, replace(scan, t1=places[0], labels=places[1], tissue=None)

    for axes in ("LAS", "IPL", "SRA"):
        yield written(axes, turned(t1, axes), turned(labels, axes))
    yield written(".nii", t1, labels, ".nii")
    yield written("int16", as_int16(t1), labels)
    yield written("scaled", scaled(t1), labels)
    yield written("padded", padded(t1), padded(labels))
    for name, motion in {
        "8 mm to the right": shift(0),
        "8 mm up": shift(2),
        "5° nod": tilt(1),
        "5° lean": tilt(0),
    }.items():
        yield written(name, moved(t1, motion), moved(labels, motion))
    yield written("1 mm", resample_to_output(t1, 1.0, order=3), resample_to_output(labels, 1.0, order=0))
    if has_deepbet():
        yield "mask from deepbet", replace(scan, labels=None, tissue=None)


def scaled(image: Image, factor: float = 0.37) -> Image:
    return Image((factor * image.get_fdata()).astype(np.float32), image.affine)


def turned(image: Image, axes: str) -> Image:
    """The same voxels in another order of axes."""
    return image.as_reoriented(ornt_transform(io_orientation(image.affine), axcodes2ornt(axes)))


def as_int16(image: Image) -> Image:
    """Integers with the scale factor that gives every value back, where the scan holds integers times a factor."""
    stored = np.asanyarray(image.dataobj.get_unscaled())
    lossless = Image(stored.astype(np.int16), image.affine)
    assert (lossless.get_fdata() == stored).all(), "the scan is not stored in 16 bits"
    lossless.header.set_slope_inter(image.dataobj.slope, image.dataobj.inter)
    return lossless


def padded(image: Image, width: int = 7) -> Image:
    """Empty slices at every end of every axis."""
    affine = image.affine.copy()
    affine[:3, 3] = (affine @ [-width, -width, -width, 1])[:3]
    return Image(np.pad(np.asanyarray(image.dataobj), width), affine)


def moved(image: Image, motion: np.ndarray) -> Image:
    """The head elsewhere in the scanner; no voxel is interpolated."""
    return Image(np.asanyarray(image.dataobj), motion @ image.affine)


def shift(axis: int, millimetres: float = 8.0) -> np.ndarray:
    motion = np.eye(4)
    motion[axis, 3] = millimetres
    return motion


def tilt(axis: int, degrees: float = 5.0) -> np.ndarray:
    """A rotation of the plane of ``axis`` and the vertical."""
    motion, angle = np.eye(4), np.radians(degrees)
    motion[np.ix_([axis, 2], [axis, 2])] = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    return motion


def one_prediction(run: Path, scan: Scan) -> tuple[float, float]:
    """Seconds and peak memory in MB of a new process that loads the model and judges one scan with labels."""
    code = (
        "import sys; from pathlib import Path; import ermoe; from ermoe.brain.data.scans import Scan\n"
        "from ermoe.brain.model import predict\n"
        "run, t1, labels = map(Path, sys.argv[1:])\n"
        "(row,) = predict(ermoe.brain.load(run).model, [Scan('sub-x', None, t1, labels=labels)])\n"
        "assert not row.problem, row.problem\n"
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))\n"
    )
    start = time.perf_counter()
    arguments: list[Any] = [sys.executable, "-c", code, run, scan.t1, scan.labels]
    # Not getrusage, which counts the memory of the process that forked.
    done = subprocess.run(arguments, check=True, capture_output=True, text=True)
    return time.perf_counter() - start, int(done.stdout) / 1024


if __name__ == "__main__":
    main()
