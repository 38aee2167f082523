"""How like the training scans a scan is, so that a model knows when not to answer.

Beside the measures that age is read from, a few signs say whether this is a T1 of an upright, whole, adult brain:
how tissues are spread in brightness, whether the brain is brighter inside than at its surface, how its parts lie in
comparison with a template of adult brains (`ermoe.brain.data.template`), and its proportions.

The distance of a scan is its deviation from the training scans in their own spread, over all signs,
d² = zᵀ C⁻¹ z / S, with C the correlation of the signs, half of it shrunk to independence because people are few.

Letters: N scans, S signs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ermoe.brain.data.nifti import bounding_box
from ermoe.brain.data.preprocess import Volume, depth_contrast
from ermoe.brain.data.template import agreement_with_template
from ermoe.brain.measures import MEASURES, Double, measures_among, tissues_of

SIGNS = (
    *MEASURES,
    "white_share",
    "fluid_share",
    "tissue_contrast",
    "tissue_spread",
    "depth_contrast",
    "template_r",
    "template_overlap",
    "upright",
    "width_over_length",
    "height_over_length",
)
"""The measures; shares of the whole brain; brightness of grey between fluid and white; width of a tissue's brightness;
brighter inside than at the surface; correlation and overlap with the template, and how
much better it is upright; proportions of the mask."""
_BOUNDS = {
    "template_r": (0.05, 1.0),
    "template_overlap": (0.80, 1.0),
    "upright": (0.0, 2.0),
    "depth_contrast": (0.5, np.inf),
    "log_litres": (np.log(0.7), np.log(2.2)),
    "width_over_length": (0.62, 1.0),
    "height_over_length": (0.58, 1.05),
}
"""Where signs of adults' T1 scans lie, on whatever scanner."""
_SHRUNK = 0.5
_LEAST_SPREAD = 0.02  # of a sign's own size: people of one scanner may agree by chance
_USUAL = 0.95
_PARTS = 20
_ANOTHER_SCANNER = 2.0  # times the usual distance
_FAR = 3.0  # times the usual distance of training scans


def signs_of(volume: Volume, spacing_mm: float) -> Double:
    """`SIGNS` of a prepared scan, (S,), of which the first are `MEASURES`."""
    t1_XYZ, mask_XYZ = np.asarray(volume.t1_XYZ), np.asarray(volume.mask_XYZ)
    tissues = tissues_of(t1_XYZ, mask_XYZ, spacing_mm)
    box = bounding_box(mask_XYZ)
    width, length, height = (side.stop - side.start for side in box)
    agreement, overlap, upright = agreement_with_template(t1_XYZ[box], mask_XYZ[box])
    return np.array(
        [
            *measures_among(tissues, spacing_mm),
            *tissues.share_MN.mean(1)[[0, 2]],
            tissues.contrast,
            tissues.spread,
            depth_contrast(t1_XYZ, mask_XYZ, spacing_mm),
            agreement,
            overlap,
            upright,
            width / length,
            height / length,
        ]
    )


@dataclass(frozen=True, slots=True)
class Likeness:
    """The training scans, as others are compared with them.

    Args:
        mean, scale: of every sign.
        inverse: C⁻¹, (S, S).
        usual: distance within which 95 % of the training scans lie when they are compared with the others.
    """

    mean: tuple[float, ...]
    scale: tuple[float, ...]
    inverse: tuple[tuple[float, ...], ...]
    usual: float

    @classmethod
    def fit(cls, sign_NS: Double) -> Likeness:
        """Of the training scans; what is usual is asked of a twentieth at a time, compared with the others."""
        part_N = np.arange(len(sign_NS)) % min(_PARTS, len(sign_NS))
        distances = []
        for part in set(part_N.tolist()):
            others = cls._of(sign_NS[part_N != part])
            distances += [others.distance(sign_S) for sign_S in sign_NS[part_N == part]]
        return replace(cls._of(sign_NS), usual=float(np.quantile(distances, _USUAL)))

    @classmethod
    def _of(cls, sign_NS: Double) -> Likeness:
        mean_S = sign_NS.mean(0)
        scale_S = np.maximum(sign_NS.std(0), _LEAST_SPREAD * np.maximum(np.abs(mean_S), 1e-3))
        z_NS = (sign_NS - mean_S) / scale_S
        correlation_SS = (1 - _SHRUNK) * z_NS.T @ z_NS / len(z_NS) + _SHRUNK * np.eye(len(mean_S))
        inverse_SS = np.linalg.inv(correlation_SS)
        rows = tuple(tuple(row) for row in inverse_SS.tolist())
        return cls(tuple(mean_S.tolist()), tuple(scale_S.tolist()), rows, 1.0)

    def distance(self, sign_S: Double) -> float:
        """In units of what is usual: 1 is as far as one training scan in twenty."""
        z_S = (sign_S - self.mean) / self.scale
        return float(np.sqrt(z_S @ np.array(self.inverse) @ z_S / len(z_S)) / self.usual)

    def widening(self, sign_S: Double) -> float:
        """By how much intervals widen: not at all up to the distance of another scanner, in proportion beyond it.

        The leverage of a ridge, which is in every interval, has widened it for the measures already.
        """
        return max(1.0, self.distance(sign_S) / _ANOTHER_SCANNER)

    def oddities(self, sign_S: Double) -> list[str]:
        """Why the scan is not to be trusted, in words; nothing if it is like those in training."""
        found = []
        for name, (low, high) in _BOUNDS.items():
            value = float(sign_S[SIGNS.index(name)])
            if not low <= value <= high:
                found.append(f"{name} is {value:.2f}, {low:.2f} to {high:.2f} in adults")
        if not found and (far := self.distance(sign_S)) > _FAR:
            z_S = (sign_S - self.mean) / self.scale
            worst = int(np.argmax(np.abs(z_S)))
            found.append(f"{far:.1f} times the usual distance from training scans, {SIGNS[worst]} above all")
        return found
