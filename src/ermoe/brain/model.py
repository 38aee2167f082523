"""A trained brain-age model: one network a fold, what is needed to read their outputs, and `predict`, which gives scans
their ages.

A folder holds ``brain_age.json`` and one model folder of `ermoe.save` for each fold. No prediction stops at a scan that
cannot be used: its row says why.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from ermoe._version import __version__
from ermoe.brain.ages import AgeBins, AgeCalibration, AgeHead, stored_head
from ermoe.brain.data.preprocess import Volume, looks_like_t1, prepare
from ermoe.brain.data.scans import Preprocessing, Scan, canonical_id
from ermoe.brain.harmonise import without_offsets
from ermoe.brain.inputs import network_input, voxels
from ermoe.brain.likeness import Likeness, signs_of
from ermoe.brain.measures import MEASURES, Double
from ermoe.brain.own_ridges import OwnRidges, group_of
from ermoe.brain.recalibration import Recalibration
from ermoe.brain.ridge import MIDDLE, Blend, Ridge
from ermoe.errors import UserError
from ermoe.files import LARGEST_TEXT, Json, from_json, is_plain_name, read_object, to_json, write_json
from ermoe.models.io import load, save
from ermoe.train.loader import Request, prepared
from ermoe.train.run_folder import RunFolder

_log = logging.getLogger("ermoe")
Result = TypeVar("Result")
DESCRIPTION = "brain_age.json"
_FORMAT = 4
_READABLE = (3, 4)  # 3: networks that learnt ages, without ridges
_AGAIN = "train the model again, or copy it again"
_TELLING = ("facts", "ridges", "blend", "recalibration", "age_range")
_OLDEST = 120.0


@dataclass(frozen=True, slots=True)
class BrainAgeModel:
    """What prediction needs.

    Args:
        networks: one a fold, by its name.
        head: how outputs mean ages.
        input: what networks are given of a scan: "t1"; "contrast", shares of tissues in every voxel; or "blocks", their
            shares in blocks of voxels and in the whole brain.
        preprocessing: what is done to a scan before that.
        patch_size: edge of a cube in voxels, which is a token, and what the occlusion map hides at a time.
        parts: hashed participant id → its part in each fold: whom the networks have seen.
        age_range: lowest and highest age of the people in it.
        mask_sources: where their brain masks came from.
        calibration: pooled and sex-specific lines for new people, None where they were refused.
        calibration_of_fold: the same for people whom a fold tests, fitted without their ages.
        temperature: τ of intervals, fitted to held-out people.
        facts: for the model card: how many people, from where, with which result.
        ridges: the linear estimate of each fold, by its name, to which networks add; none where they learnt ages.
        own_ridges: those of the scanners that were in training, by fold.
        recalibration: of people of another site, None unless `ermoe brain recalibrate` made the model.
        likeness: what the training scans are like, None in models that did not ask.
        blend: how much networks are believed, and how wide intervals are, for new people.
        blend_of_fold: the same for people whom a fold tests, told without their ages.
    """

    networks: Mapping[str, nn.Module]
    head: AgeHead
    input: str
    preprocessing: Preprocessing
    patch_size: int
    parts: Mapping[str, tuple[str, ...]]
    age_range: tuple[float, float]
    mask_sources: tuple[str, ...]
    calibration: AgeCalibration | None
    calibration_of_fold: Mapping[str, AgeCalibration | None]
    temperature: float
    facts: Mapping[str, Any]
    ridges: Mapping[str, Ridge] = field(default_factory=dict)
    own_ridges: Mapping[str, OwnRidges] = field(default_factory=dict)
    likeness: Likeness | None = None
    recalibration: Recalibration | None = None
    blend: Blend = field(default_factory=Blend)
    blend_of_fold: Mapping[str, Blend] = field(default_factory=dict)

    @property
    def folds(self) -> list[str]:
        """Their names."""
        return list(self.ridges or self.networks)

    def parts_of(self, participant_id: str) -> dict[str, str]:
        """A person's part in each fold, by its name; nothing for people who were not in the training set."""
        parts = self.parts.get(hashed_id(participant_id))
        return {} if parts is None else dict(zip(self.folds, parts, strict=True))

    def folds_for(self, participant_id: str) -> tuple[list[str], bool]:
        """The folds that may judge a person, and whether the person was seen by some of the others.

        Nobody is judged by a network that has learnt from them, unless there is no other.
        """
        parts = self.parts_of(participant_id)
        unseen = [name for name, part in parts.items() if part == "test"]
        return unseen or self.folds, len(unseen) < len(parts)

    def worth(self, fold: str, participant_id: str) -> float:
        """How much of what a fold's network says of a person is believed, 0 to 1: all where networks learnt ages."""
        if not self.ridges:
            return 1.0
        is_tested = "test" in self.parts_of(participant_id).values()
        return (self.blend_of_fold[fold] if is_tested else self.blend).worth

    def fold_without(self, people: Sequence[str]) -> str:
        """The first fold whose network has learnt from none of these people; `UserError` if there is none."""
        known = {person: parts for person in people if (parts := self.parts_of(person))}
        learnt = {fold: [who for who, parts in known.items() if parts[fold] != "test"] for fold in self.folds}
        best = min(learnt, key=lambda fold: len(learnt[fold]))
        if fewest := learnt[best]:
            shown = ", ".join(fewest[:5]) + (", …" if len(fewest) > 5 else "")
            raise UserError(
                f"every network to start from has learnt from people who are to be held out ({shown}): start from a "
                "model of other people, or split as it did (same folds and fold seed)"
            )
        return best

    @torch.no_grad()
    def outputs(self, volume_BCXYZ: Tensor, mask_BXYZ: Tensor, folds: Sequence[str]) -> Tensor:
        """Raw outputs of the given folds, (F, B, K)."""
        found = []
        for name in folds:
            network = self.networks[name].eval()
            weight = next(network.parameters())
            found.append(network(volume_BCXYZ.to(weight), mask_BXYZ.to(weight.device)).float().cpu())
        return torch.stack(found)

    def ages(self, output_FBK: Tensor) -> Tensor:
        """The mean over folds of the predicted ages, (B,)."""
        return torch.stack([self.head.age(output_BK) for output_BK in output_FBK]).mean(0)

    def intervals(self, output_FBK: Tensor) -> Tensor | None:
        """Lower and upper limits (B, 2) from the bins' mean probabilities; None for a regression."""
        if not isinstance(self.head, AgeBins):
            return None
        return self.head.interval(self.head.probability(output_FBK, self.temperature).mean(0))

    @property
    def name(self) -> str:
        """What tells it from other models, wherever it lies: a fingerprint of what it says of itself."""
        plain = {field.name: to_json(getattr(self, field.name)) for field in fields(self) if field.name in _TELLING}
        digest = hashlib.sha256(json.dumps(plain, sort_keys=True, default=str).encode()).hexdigest()[:10]
        return f"model {digest}"

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes everything; the description last, so that a folder that has one is complete."""
        folder = Path(folder)
        for name, network in self.networks.items():
            save(network, folder / name)
        plain = {field.name: to_json(getattr(self, field.name)) for field in fields(self) if field.name != "networks"}
        description = {"format": _FORMAT, "ermoe_version": __version__, "folds": self.folds, **plain}
        description["calibration"] = _lines(self.calibration)
        description["calibration_of_fold"] = {fold: _lines(own) for fold, own in self.calibration_of_fold.items()}
        write_json(folder / DESCRIPTION, description)

    @classmethod
    def load(cls, model: str | os.PathLike[str], device: torch.device | str = "cpu") -> BrainAgeModel:
        """From a model folder, or from the run folder it lies in."""
        run = RunFolder(Path(model))
        folder = run.final if run.config.is_file() else run.folder
        path = folder / DESCRIPTION
        stored = _read(path)
        folds = stored.pop("folds", None)
        if not isinstance(folds, list) or not folds or not all(map(is_plain_name, folds)):
            raise UserError(f"{path} names no folds in this folder: {_AGAIN}")
        is_linear = stored.get("ridges") and not any((folder / name).is_dir() for name in folds)
        networks = {} if is_linear else {name: load(folder / name, device=device).eval() for name in folds}
        try:
            return cls._described(stored, networks, folds, str(path))
        except UserError:
            raise
        except Exception as problem:  # whatever its parts make of values that they did not expect
            raise UserError(f"{path} is damaged ({type(problem).__name__}: {problem}); {_AGAIN}") from problem

    @classmethod
    def _described(cls, stored: Json, networks: Mapping[str, nn.Module], folds: list[str], where: str) -> BrainAgeModel:
        """The model of a description and its networks."""
        for name in ("format", "ermoe_version"):
            del stored[name]
        stored["head"] = stored_head(stored["head"], where=where)
        stored["calibration"] = _with_lines(stored["calibration"])
        stored["calibration_of_fold"] = {fold: _with_lines(own) for fold, own in stored["calibration_of_fold"].items()}
        model = from_json(cls, {**stored, "networks": networks}, where=where)
        outputs = {name: int(getattr(network, "num_classes", 0)) for name, network in networks.items()}
        if odd := [name for name, number in outputs.items() if number != model.head.num_outputs]:
            raise UserError(f"{where} reads {model.head.num_outputs} outputs, and {odd[0]} has others: {_AGAIN}")
        if any(len(parts) != len(folds) for parts in model.parts.values()):
            raise UserError(f"{where} lists people without a part in each of its {len(folds)} folds: {_AGAIN}")
        if model.folds != folds or (model.ridges and set(model.blend_of_fold) != set(folds)):
            raise UserError(f"{where} has no ridge for each of its {len(folds)} folds: {_AGAIN}")
        return model


def _lines(calibration: AgeCalibration | None) -> Json | None:
    """A calibration is stored as its lines."""
    return None if calibration is None else to_json(calibration.lines)


def _with_lines(lines: Json | None) -> Json | None:
    return None if lines is None else {"lines": lines}


def _read(path: Path) -> Json:
    if not path.is_file():
        raise UserError(f"{path.parent} holds no brain-age model: name a run of `ermoe brain train` that is finished")
    description = read_object(path, _AGAIN, limit=LARGEST_TEXT)  # people are listed in it
    if description.get("format") not in _READABLE:
        raise UserError(f"{path} has format {description.get('format')}, this version reads {_FORMAT}: train it again")
    return description


def hashed_id(participant_id: str) -> str:
    """A participant's id as models remember it: recognisable, not readable, and deaf to case, padding and "sub-".

    >>> hashed_id("sub-01") == hashed_id("SUB-1") == hashed_id("001")
    True
    """
    return hashlib.sha256(f"ermoe brain age {canonical_id(participant_id)}".encode()).hexdigest()[:16]


@dataclass(frozen=True, slots=True)
class Prediction:
    """One scan's row. Numbers are NaN where there is none; ``problem`` says why a scan has no age."""

    participant_id: str
    session_id: str | None
    scan: str
    age: float
    """Chronological, if the table has one."""
    sex: str | None
    brain_age: float = math.nan
    """Raw: the mean over folds."""
    brain_age_ridge: float = math.nan
    """By ridges alone."""
    brain_age_low: float = math.nan
    brain_age_high: float = math.nan
    """Limits of the 90 % interval."""
    brain_age_calibrated: float = math.nan
    """By the pooled line of held-out people; needs no age."""
    brain_age_calibrated_sex: float = math.nan
    """By the line of the scan's sex."""
    brain_age_recalibrated: float = math.nan
    """By the line of people of another site, in models that have one."""
    gap: float = math.nan
    """Raw brain age minus age."""
    fold_sd: float = math.nan
    """Standard deviation over the folds that judged."""
    num_folds: int = 0
    mask_source: str | None = None
    seen_in_training: bool = False
    """The person was: only folds that had not learnt from them judge, if there are such."""
    outside_age_range: bool = False
    """Age, or where it is unknown brain age, outside of those in training."""
    unusual_mask: bool = False
    """No training scan had its mask from this source."""
    distance: float = math.nan
    """From the training scans: 1 is as far as one of them in twenty; intervals widen with it."""
    unlike_training: str = ""
    """What is odd about the scan, in words: it may be no T1 of an adult's whole, upright brain."""
    unlike_t1: bool = False
    """The brain is hardly brighter inside than at its surface, as in no T1 of an adult."""
    problem: str = ""

    @property
    def at_its_site(self) -> float:
        """The recalibrated age in models that have one, else the raw one."""
        return self.brain_age if math.isnan(self.brain_age_recalibrated) else self.brain_age_recalibrated

    @property
    def flags(self) -> list[str]:
        """What to know before the age is used, in words."""
        known = {
            "seen in training": self.seen_in_training,
            "outside the training ages": self.outside_age_range,
            f"mask from {self.mask_source}, unlike training": self.unusual_mask,
            f"unlike the training scans: {self.unlike_training}": bool(self.unlike_training),
            "not like a T1: hardly brighter inside the brain than at its surface": self.unlike_t1,
        }
        return [text for text, is_set in known.items() if is_set]

    @classmethod
    def of(cls, scan: Scan, **found: Any) -> Prediction:
        """The row of a scan with what was found, or with the problem that kept anything from being found."""
        age = math.nan if scan.age is None else scan.age
        return cls(scan.participant_id, scan.session_id, str(scan.t1), age, scan.sex, **found)


def predict(
    model: BrainAgeModel,
    scans: Sequence[Scan],
    *,
    read: Callable[[Scan], Volume] | None = None,
    signs: Callable[[Scan], Double] | None = None,
    workers: int = 0,
) -> Iterator[Prediction]:
    """A row for every scan, as it is ready.

    ``read`` prepares a scan, by default as the model's training did; ``workers`` processes do so ahead. ``signs`` says
    what is known of a scan already, by default nothing.
    """
    reader = partial(_read_one, scans, read or partial(prepare, preprocessing=model.preprocessing))
    requests = [(0, np.array([number])) for number in range(len(scans))]
    warned: set[str | None] = set()
    _say_sites(model, scans)
    # one scan at a time needs no loader
    volumes = prepared(reader, requests, workers=workers) if workers else map(reader, requests)
    for scan, volume in zip(scans, volumes, strict=True):
        row = volume if isinstance(volume, str) else _attempt(scan, partial(_judge, model, scan, volume, signs))
        if isinstance(row, str):
            row = Prediction.of(scan, problem=row)
        elif row.unusual_mask and row.mask_source not in warned:
            warned.add(row.mask_source)
            _log.warning(
                "brain masks from %r: the model was trained with masks from %s, which cut brains out differently",
                row.mask_source,
                ", ".join(model.mask_sources),
            )
        yield row


def _say_sites(model: BrainAgeModel, scans: Sequence[Scan]) -> None:
    """Which scanners get a ridge of their own, and that harmonising does nothing for sites it has not met."""
    for ridges in list(model.own_ridges.values())[:1]:
        groups = {group_of(scan, ridges.columns) for scan in scans}
        if own := sorted(str(group) for group in groups & set(ridges.own)):
            _log.warning(
                "%s %s: in training, so the ridge of its own counts; --no-own-ridges if this is another scanner",
                ", ".join(ridges.columns),
                "; ".join(own[:5]),
            )
    if column := model.facts.get("harmonise"):
        known = {site for ridge in model.ridges.values() for site in ridge.offsets}
        unknown = sorted({str(scan.value(column)) for scan in scans} - known)
        if unknown:
            _log.warning(
                "%s %s: not in training, so nothing is harmonised there; recalibrate with people of known age",
                column,
                ", ".join(unknown[:5]),
            )


def _read_one(scans: Sequence[Scan], read: Callable[[Scan], Volume], request: Request) -> Volume | str:
    """Prepares a scan, in this process or in another: its volume, or why there is none."""
    scan = scans[int(request[1][0])]
    return _attempt(scan, partial(read, scan))


def _attempt(scan: Scan, work: Callable[[], Result]) -> Result | str:
    """What comes of it, or why nothing does: whatever it is, the scans after this one are still to be judged."""
    try:
        return work()
    except UserError as reason:
        return str(reason)
    except Exception as reason:
        _log.debug("%s", scan.key, exc_info=True)
        return f"{scan.key}: {scan.t1} failed ({type(reason).__name__}: {reason})"


@dataclass(frozen=True, slots=True)
class _Answer:
    """What the folds say of one scan, each by itself, and together."""

    age_F: Tensor
    low: float
    high: float
    ridge: float = math.nan

    @property
    def age(self) -> float:
        return float(self.age_F.mean())


def _by_networks(model: BrainAgeModel, volume: Volume, folds: Sequence[str]) -> Tensor:
    """Raw outputs of the folds' networks, (F, 1, K)."""
    seen_CXYZ, mask_XYZ = network_input(model.input, *voxels(volume))
    return model.outputs(seen_CXYZ.unsqueeze(0), mask_XYZ.unsqueeze(0), folds)


def _alone(model: BrainAgeModel, volume: Volume, folds: Sequence[str]) -> _Answer:
    """By networks that learnt ages."""
    output_FBK = _by_networks(model, volume, folds)
    limits_B2 = model.intervals(output_FBK)
    low, high = (math.nan, math.nan) if limits_B2 is None else limits_B2[0].tolist()
    return _Answer(torch.stack([model.head.age(output_BK)[0] for output_BK in output_FBK]), low, high)


def _blended(
    model: BrainAgeModel, scan: Scan, volume: Volume, sign_S: Double, folds: Sequence[str], *, is_known: bool
) -> _Answer:
    """By ridges and what networks, so far as they are believed, add to them: ridge + worth · (network − 50)."""
    measure_of = {fold: _harmonised(model, scan, sign_S[: len(MEASURES)], fold) for fold in folds}
    blends = [model.blend_of_fold[fold] if is_known else model.blend for fold in folds]
    ridge_F, width_F = (
        torch.tensor([float(take(model.ridges[fold], measure_of[fold])[0]) for fold in folds])
        for take in (Ridge.ages, Ridge.width)
    )
    own = [model.own_ridges.get(fold, OwnRidges()) for fold in folds]
    for number, fold in enumerate(folds):
        ridge_F[number] += float(own[number].added(model.ridges[fold], measure_of[fold], [scan])[0])
    is_stranger = not any(ridges.knows(scan) for ridges in own)
    age_F = ridge_F.clone()
    if model.networks and any(one.worth for one in blends):
        added_F = torch.stack([model.head.age(one)[0] for one in _by_networks(model, volume, folds)]) - MIDDLE
        age_F += torch.tensor([one.worth for one in blends]) * added_F
    spread_F = torch.tensor([one.reach(is_stranger=is_stranger) for one in blends])
    reach = float((spread_F * width_F).mean())
    reach *= 1.0 if model.likeness is None else model.likeness.widening(sign_S)
    age = float(age_F.mean())
    # Nobody is younger than 0 or older than 120, however little is known.
    low, high = max(age - reach, min(age, 0.0)), min(age + reach, max(age, _OLDEST))
    return _Answer(age_F, low, high, float(ridge_F.mean()))


def _harmonised(model: BrainAgeModel, scan: Scan, measure_F: Double, fold: str) -> Double:
    """Measures as the ridge of a fold reads them, (1, F): without what the scan's site adds, if the fold knows it."""
    if not model.ridges[fold].offsets:
        return measure_F[None]
    site = scan.value(str(model.facts.get("harmonise")))
    return without_offsets(measure_F[None], [site], model.ridges[fold].offsets)


def _judge(model: BrainAgeModel, scan: Scan, volume: Volume, signs: Callable[[Scan], Double] | None) -> Prediction:
    folds, seen = model.folds_for(scan.participant_id)
    is_tested = "test" in model.parts_of(scan.participant_id).values()
    sign_S = np.zeros(0)
    if model.likeness is not None:
        sign_S = signs_of(volume, model.preprocessing.spacing_mm) if signs is None else signs(scan)
    if model.ridges:
        answer = _blended(model, scan, volume, sign_S, folds, is_known=is_tested)
    else:
        answer = _alone(model, volume, folds)
    raw = answer.age
    if not math.isfinite(raw):
        raise UserError(f"{scan.key}: the network's answer is no number; look at the scan with `ermoe brain check`")
    youngest, oldest = model.age_range
    known_age = raw if scan.age is None else scan.age
    return Prediction.of(
        scan,
        brain_age=raw,
        brain_age_ridge=answer.ridge,
        brain_age_low=answer.low,
        brain_age_high=answer.high,
        **_calibrated(model, scan, raw, dict(zip(folds, answer.age_F.tolist(), strict=True))),
        gap=math.nan if scan.age is None else raw - scan.age,
        fold_sd=float(answer.age_F.std(unbiased=False)),
        num_folds=len(folds),
        mask_source=volume.mask_source,
        seen_in_training=seen,
        outside_age_range=not youngest <= known_age <= oldest,
        unusual_mask=volume.mask_source not in model.mask_sources,
        **_compared(model, sign_S),
        brain_age_recalibrated=math.nan if model.recalibration is None else model.recalibration.applied(raw),
        unlike_t1=not looks_like_t1(volume.t1_XYZ, volume.mask_XYZ, model.preprocessing.spacing_mm),
    )


def _compared(model: BrainAgeModel, sign_S: Double) -> dict[str, Any]:
    """How far the scan is from the training scans, and what is odd about it."""
    if model.likeness is None:
        return {}
    return {
        "distance": model.likeness.distance(sign_S),
        "unlike_training": "; ".join(model.likeness.oddities(sign_S)),
    }


def _calibrated(model: BrainAgeModel, scan: Scan, raw: float, raw_of_fold: dict[str, float]) -> dict[str, Any]:
    """New people get the line of everybody held out; people of the training set those that never saw their ages."""
    pairs = [(model.calibration, raw)]
    if parts := model.parts_of(scan.participant_id):
        tested = [(fold, age) for fold, age in raw_of_fold.items() if parts[fold] == "test"]
        pairs = [(model.calibration_of_fold[fold], age) for fold, age in tested]
    lines = [(line, age) for line, age in pairs if line is not None]
    if not lines:
        return {}
    return {
        "brain_age_calibrated": float(np.mean([line.pooled([age])[0] for line, age in lines])),
        "brain_age_calibrated_sex": float(np.mean([line.by_sex([age], [scan.sex])[0] for line, age in lines])),
    }


def recalibrated(
    model: BrainAgeModel, scans: Sequence[Scan], *, where: str = "", other_people: bool = False, workers: int = 0
) -> BrainAgeModel:
    """The model with the line of these people of another site, of whom it must have learnt from none.

    A person counts once, with the first scan; scans without an age or a prediction, or unlike the training scans, are
    left out. ``other_people`` says that ids which the training set has too are those of others.
    """
    asked = replace(model, parts={}) if other_people else model
    if known := [scan.participant_id for scan in scans if asked.parts_of(scan.participant_id)]:
        raise UserError(
            f"{len(known)} of these people have ids of the training set, {known[0]} for one: recalibrate with other "
            "people, or say --other-people if they only share their ids"
        )
    rows = [row for row in predict(asked, scans, workers=workers) if not row.problem and not row.unlike_training]
    first: dict[str, Prediction] = {}
    for row in rows:
        if not math.isnan(row.age):
            first.setdefault(row.participant_id, row)
    ages, predicted = zip(*((row.age, row.brain_age) for row in first.values()), strict=True) if first else ((), ())
    return replace(model, recalibration=Recalibration.fit(ages, predicted, where=where))
