"""Ages of new scans. Nothing stops at a scan that cannot be used: its row says why."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from ermoe.brain.data.mask import looks_like_t1
from ermoe.brain.data.preprocess import Volume, prepare
from ermoe.brain.data.scans import Scan
from ermoe.brain.inputs import voxels, whole_input
from ermoe.brain.model import BrainAgeModel
from ermoe.brain.results import LEVEL
from ermoe.errors import UserError
from ermoe.train.loader import Request, prepared

_log = logging.getLogger("ermoe")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Prediction:
    """One scan's row. Numbers are NaN where there is none; ``problem`` says why a scan has no age."""

    participant_id: str
    session_id: str | None
    scan: str
    age: float
    """Chronological, if the table has one."""
    sex: str | None
    brain_age: float
    """Raw: the mean over folds of the expectation."""
    brain_age_low: float
    brain_age_high: float
    """Limits of the 90 % interval."""
    brain_age_calibrated: float
    """By the pooled line of held-out people; needs no age."""
    brain_age_calibrated_sex: float
    """By the line of the scan's sex."""
    gap: float
    """Raw brain age minus age."""
    fold_sd: float
    """Standard deviation over the folds that judged."""
    num_folds: int
    mask_source: str | None
    seen_in_training: bool
    """The person was: only folds that had not learnt from them judge, if there are such."""
    outside_age_range: bool
    """Age, or where it is unknown brain age, outside of those in training."""
    unusual_mask: bool
    """No training scan had its mask from this source."""
    unlike_t1: bool
    """The brain is hardly brighter inside than at its surface, as in no T1 of an adult."""
    problem: str

    @classmethod
    def failure(cls, scan: Scan, reason: str) -> Prediction:
        """The row of a scan that could not be used."""
        numbers: dict[str, Any] = dict.fromkeys(_NUMBERS, math.nan)
        age = math.nan if scan.age is None else scan.age
        flags = dict.fromkeys(("seen_in_training", "outside_age_range", "unusual_mask", "unlike_t1"), False)
        return cls(
            scan.participant_id, scan.session_id, str(scan.t1), age, scan.sex,
            num_folds=0, mask_source=None, problem=reason, **numbers, **flags,
        )  # fmt: skip


_NUMBERS = (
    "brain_age", "brain_age_low", "brain_age_high", "brain_age_calibrated", "brain_age_calibrated_sex", "gap",
    "fold_sd",
)  # fmt: skip
COLUMNS = tuple(field.name for field in fields(Prediction))


def predict(
    model: BrainAgeModel, scans: Sequence[Scan], *, read: Callable[[Scan], Volume] | None = None, workers: int = 0
) -> Iterator[Prediction]:
    """A row for every scan, as it is ready.

    ``read`` prepares a scan, by default as the model's training did; ``workers`` processes do so ahead.
    """
    reader = _Reader(scans, read or partial(prepare, preprocessing=model.preprocessing))
    requests = [(0, np.array([number])) for number in range(len(scans))]
    warned: set[str] = set()
    volumes = prepared(reader, requests, workers=workers) if workers else map(reader, requests)
    for scan, volume in zip(scans, volumes, strict=True):
        if isinstance(volume, str):
            yield Prediction.failure(scan, volume)
            continue
        row = _attempt(scan, partial(_judge, model, scan, volume))
        if isinstance(row, str):
            yield Prediction.failure(scan, row)
            continue
        if row.unusual_mask and volume.mask_source not in warned:
            warned.add(volume.mask_source)
            known = ", ".join(model.mask_sources)
            _log.warning(
                "brain masks from %r: the model was trained with masks from %s, which cut brains out differently",
                volume.mask_source,
                known,
            )
        yield row


@dataclass(frozen=True, slots=True)
class _Reader:
    """Prepares one scan at a time, in this process or in another: its volume, or why there is none."""

    scans: Sequence[Scan]
    read: Callable[[Scan], Volume]

    def __call__(self, request: Request) -> Volume | str:
        scan = self.scans[int(request[1][0])]
        return _attempt(scan, partial(self.read, scan))


def _attempt(scan: Scan, work: Callable[[], Result]) -> Result | str:
    """What comes of it, or why nothing does: whatever it is, the scans after this one are still to be judged."""
    try:
        return work()
    except UserError as reason:
        return str(reason)
    except Exception as reason:
        _log.debug("%s", scan.key, exc_info=True)
        return f"{scan.key}: {scan.t1} failed ({type(reason).__name__}: {reason})"


def _judge(model: BrainAgeModel, scan: Scan, volume: Volume) -> Prediction:
    folds, seen = model.folds_for(scan.participant_id)
    seen_CXYZ, mask_XYZ = whole_input(model.input, *voxels(volume))
    output_FBK = model.outputs(seen_CXYZ.unsqueeze(0), mask_XYZ.unsqueeze(0), folds)
    raw = float(model.ages(output_FBK)[0])
    if not math.isfinite(raw):
        raise UserError(f"{scan.key}: the network's answer is no number; look at the scan with `ermoe brain doctor`")
    single_F = torch.stack([model.head.age(output_BK)[0] for output_BK in output_FBK])
    limits_B2 = model.intervals(output_FBK, LEVEL)
    low, high = (math.nan, math.nan) if limits_B2 is None else limits_B2[0].tolist()
    age = math.nan if scan.age is None else scan.age
    youngest, oldest = model.age_range
    known_age = raw if scan.age is None else scan.age
    return Prediction(
        participant_id=scan.participant_id,
        session_id=scan.session_id,
        scan=str(scan.t1),
        age=age,
        sex=scan.sex,
        brain_age=raw,
        brain_age_low=low,
        brain_age_high=high,
        **_calibrated(model, scan, raw, dict(zip(folds, single_F.tolist(), strict=True))),
        gap=raw - age,
        fold_sd=float(single_F.std(unbiased=False)),
        num_folds=len(folds),
        mask_source=volume.mask_source,
        seen_in_training=seen,
        outside_age_range=not youngest <= known_age <= oldest,
        unusual_mask=volume.mask_source not in model.mask_sources,
        unlike_t1=not looks_like_t1(volume.t1_XYZ, volume.mask_XYZ, model.preprocessing.spacing_mm),
        problem="",
    )


def _calibrated(model: BrainAgeModel, scan: Scan, raw: float, raw_of_fold: dict[str, float]) -> dict[str, Any]:
    """New people get the line of everybody held out; people of the training set those that never saw their ages."""
    if not model.knows(scan.participant_id):
        pairs = [(model.calibration, raw)]
    elif model.is_tested_by(scan.participant_id, raw_of_fold):
        pairs = [(model.calibration_of_fold[fold], age) for fold, age in raw_of_fold.items()]
    else:
        pairs = [(None, raw)]
    lines = [(line, age) for line, age in pairs if line is not None]
    if not lines:
        return {"brain_age_calibrated": math.nan, "brain_age_calibrated_sex": math.nan}
    return {
        "brain_age_calibrated": float(np.mean([line.pooled([age])[0] for line, age in lines])),
        "brain_age_calibrated_sex": float(np.mean([line.by_sex([age], [scan.sex])[0] for line, age in lines])),
    }
