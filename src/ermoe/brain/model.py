"""A trained estimator: its networks, one a fold, and everything without which they would mean nothing.

A folder holds ``brain_age.json`` and one model folder of `ermoe.save` for each fold.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ermoe._version import __version__
from ermoe.brain.age_head import AgeBins, AgeHead, age_head
from ermoe.brain.calibration import AgeCalibration, Line
from ermoe.brain.data.scans import canonical_id
from ermoe.brain.data.settings import Preprocessing
from ermoe.brain.data.splits import Splits
from ermoe.errors import UserError
from ermoe.files import Json, from_json, read_json, to_json, write_json
from ermoe.models.io import load, save

_DESCRIPTION = "brain_age.json"
_FORMAT = 3


@dataclass(frozen=True, slots=True)
class BrainAgeModel:
    """What prediction needs.

    Args:
        networks: one a fold, by its name.
        head: how outputs mean ages.
        input: what networks are given of a scan, "t1" or "contrast".
        preprocessing: what is done to a scan before that.
        parts: hashed participant id → its part in each fold: whom the networks have seen.
        age_range: lowest and highest age of the people in it.
        mask_sources: where their brain masks came from.
        calibration: pooled and sex-specific lines for new people, None where they were refused.
        calibration_of_fold: the same for people whom a fold tests, fitted without their ages.
        temperature: τ of intervals, fitted to held-out people.
        facts: for the model card: how many people, from where, with which result.
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

    def folds_for(self, participant_id: str) -> tuple[list[str], bool]:
        """The folds that may judge a person, and whether the person was seen by some of the others.

        Nobody is judged by a network that has learnt from them, unless there is no other.
        """
        parts = self.parts.get(hashed_id(participant_id))
        names = list(self.networks)
        if parts is None:
            return names, False
        unseen = [name for name, part in zip(names, parts, strict=True) if part == "test"]
        return unseen or names, any(part != "test" for part in parts)

    def knows(self, participant_id: str) -> bool:
        """Whether a person was in the training set, in whatever part."""
        return hashed_id(participant_id) in self.parts

    def is_tested_by(self, participant_id: str, folds: Iterable[str]) -> bool:
        """Whether none of these folds has learnt from a person of the training set."""
        part_of = dict(zip(self.networks, self.parts[hashed_id(participant_id)], strict=True))
        return all(part_of[fold] == "test" for fold in folds)

    def fold_without(self, people: Sequence[str]) -> str:
        """The first fold whose network has learnt from none of these people; `UserError` if there is none."""
        known = {person: parts for person in people if (parts := self.parts.get(hashed_id(person))) is not None}
        names = list(self.networks)
        learnt = [[person for person, parts in known.items() if parts[fold] != "test"] for fold in range(len(names))]
        fewest = min(learnt, key=len)
        if fewest:
            shown = ", ".join(fewest[:5]) + (", …" if len(fewest) > 5 else "")
            raise UserError(
                f"every network to start from has learnt from people who are to be held out ({shown}): start from a "
                "model of other people, or split as it did (same folds and fold seed)"
            )
        return names[learnt.index([])]

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

    def intervals(self, output_FBK: Tensor, level: float = 0.9) -> Tensor | None:
        """Lower and upper limits (B, 2) from the bins' mean probabilities; None for a regression."""
        if not isinstance(self.head, AgeBins):
            return None
        probability_BK = self.head.probability(output_FBK, self.temperature).mean(0)
        return self.head.quantiles(probability_BK, [(1 - level) / 2, (1 + level) / 2])

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes everything; the description last, so that a folder that has one is complete."""
        folder = Path(folder)
        for name, network in self.networks.items():
            save(network, folder / name)
        description = {
            "format": _FORMAT,
            "ermoe_version": __version__,
            "folds": list(self.networks),
            "head": to_json(self.head),
            "input": self.input,
            "preprocessing": to_json(self.preprocessing),
            "patch_size": self.patch_size,
            "age_range": list(self.age_range),
            "mask_sources": list(self.mask_sources),
            "calibration": _stored(self.calibration),
            "calibration_of_fold": {fold: _stored(own) for fold, own in self.calibration_of_fold.items()},
            "temperature": self.temperature,
            "facts": dict(self.facts),
            "parts": {person: list(parts) for person, parts in self.parts.items()},
        }
        write_json(folder / _DESCRIPTION, description)

    @classmethod
    def load(cls, place: str | os.PathLike[str], device: torch.device | str = "cpu") -> BrainAgeModel:
        """From a model folder, or from the run folder it lies in."""
        folder = Path(place)
        folder = folder if (folder / _DESCRIPTION).is_file() else folder / "model"
        description = _read(folder, place)
        source = str(folder / _DESCRIPTION)
        low, high = description["age_range"]
        return cls(
            networks={name: load(folder / name, device=device).eval() for name in description["folds"]},
            preprocessing=from_json(Preprocessing, description["preprocessing"], source=source),
            head=age_head(description["head"], source=source),
            input=description["input"],
            patch_size=description["patch_size"],
            parts={person: tuple(parts) for person, parts in description["parts"].items()},
            age_range=(low, high),
            mask_sources=tuple(description["mask_sources"]),
            calibration=_calibration(description["calibration"], source),
            calibration_of_fold={
                fold: _calibration(own, source) for fold, own in description["calibration_of_fold"].items()
            },
            temperature=description["temperature"],
            facts=description["facts"],
        )


def _stored(calibration: AgeCalibration | None) -> Json | None:
    return None if calibration is None else to_json(calibration.lines)


def _calibration(stored: Json | None, source: str) -> AgeCalibration | None:
    if stored is None:
        return None
    return AgeCalibration({name: from_json(Line, line, source=source) for name, line in stored.items()})


def _read(folder: Path, place: str | os.PathLike[str]) -> Json:
    path = folder / _DESCRIPTION
    if not path.is_file():
        raise UserError(f"{place} holds no brain-age model: name a run of `ermoe brain train` that is finished")
    description: Json = read_json(path, "train the model again, or copy it again")
    if description.get("format") != _FORMAT:
        raise UserError(f"{path} has format {description.get('format')}, this version reads {_FORMAT}: train it again")
    return description


def hashed_id(participant_id: str) -> str:
    """A participant's id as models remember it: recognisable, not readable, and deaf to case, padding and "sub-".

    >>> hashed_id("sub-01") == hashed_id("SUB-1") == hashed_id("001")
    True
    """
    return hashlib.sha256(f"ermoe brain age {canonical_id(participant_id)}".encode()).hexdigest()[:16]


def hashed_parts(splits: Splits) -> dict[str, tuple[str, ...]]:
    """Everybody's parts, under hashed ids."""
    return {hashed_id(person): tuple(parts) for person, parts in splits.parts.items()}
