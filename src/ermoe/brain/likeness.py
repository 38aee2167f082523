"""How like the training scans a scan is, so that a model knows when not to answer.

Beside the measures that age is read from, a few signs say whether this is a T1 of an upright, whole, adult brain:
how tissues are spread in brightness, whether the brain is brighter inside than at its surface, how its parts lie in
comparison with a template of adult brains, and its proportions. The template is laid over the box of the brain mask,
so neither position nor size matter, and what is compared are coarse cells: no scan is too blurred for it.

The distance of a scan is its deviation from the training scans in their own spread, over all signs,
d² = zᵀ C⁻¹ z / S, with C the correlation of the signs, half of it shrunk to independence because people are few.

Letters: N scans, S signs, X, Y, Z cells of the template.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from ermoe.brain.data.cache import VolumeCache
from ermoe.brain.data.nifti import bounding_box
from ermoe.brain.data.preprocess import Volume, depth_contrast
from ermoe.brain.data.scans import Scan
from ermoe.brain.measures import MEASURES, Double, measures_among, tissues_of

_CELLS = (20, 24, 20)
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
_SIGNS_NAME = "signs1"
"""Of the files that keep them; another one whenever the signs of a scan change."""
_BOUNDS = {
    "template_r": (0.05, 1.0),
    "template_overlap": (0.80, 1.0),
    "upright": (0.0, 2.0),
    "depth_contrast": (0.5, np.inf),
    "log_litres": (np.log(0.85), np.log(2.2)),
    "width_over_length": (0.62, 1.0),
    "height_over_length": (0.58, 1.05),
}
"""Where signs of adults' T1 scans lie, on whatever scanner."""
_SENTENCES = {
    "upright": "lies in the template better upside down or back to front",
    "depth_contrast": "hardly brighter inside than at its surface, as no T1 of an adult is",
    "template_r": "its brightness is laid out unlike that of an adult's T1",
}
_WORDS = {
    "template_overlap": "its overlap with an adult's brain",
    "width_over_length": "its width over its length",
    "height_over_length": "its height over its length",
    "log_litres": "the size of the brain",
    "log_ventricles": "the size of its ventricles",
    "cortex_mm": "the thickness of its cortex",
    "tissue_contrast": "the contrast between tissues",
    "tissue_spread": "the noise of its tissues",
    "white_share": "its share of white matter",
    "fluid_share": "its share of fluid",
    **{f"grey_{depth}mm": f"its grey matter deeper than {depth} mm" for depth in (4, 8, 12, 16)},
    "fluid_8mm": "its fluid deeper than 8 mm",
}
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


def kept_signs(volumes: VolumeCache, scan: Scan) -> Double:
    """`SIGNS` of a scan, (S,), measured once and kept beside its prepared volume."""
    return volumes.kept(scan, _SIGNS_NAME, partial(signs_of, spacing_mm=volumes.preprocessing.spacing_mm))


def agreement_with_template(t1_XYZ: NDArray[np.float32], mask_XYZ: NDArray[np.bool_]) -> tuple[float, float, float]:
    """Correlation of brightness inside both brains, Dice of the two, and how much better they agree as the scan lies.

    That is, than upside down, back to front, or both; t1_XYZ and mask_XYZ are the box of a brain.
    """
    template_XYZ, brain_XYZ = _template()
    own_XYZ, inside_XYZ = _in_cells(t1_XYZ * mask_XYZ), _in_cells(mask_XYZ.astype(np.float32))
    mean_XYZ = own_XYZ / np.maximum(inside_XYZ, 1e-6)
    turned = [
        _correlation(mean_XYZ[:, ::y, ::z], template_XYZ, (inside_XYZ[:, ::y, ::z] > 0.9) & (brain_XYZ > 0.9))
        + _correlation(inside_XYZ[:, ::y, ::z], brain_XYZ, (brain_XYZ > 0.02) & (brain_XYZ < 0.98))
        for y, z in ((1, 1), (1, -1), (-1, 1), (-1, -1))
    ]
    agreement = _correlation(mean_XYZ, template_XYZ, (inside_XYZ > 0.9) & (brain_XYZ > 0.9))
    own, other = inside_XYZ > 0.5, brain_XYZ > 0.5
    return agreement, float(2 * (own & other).sum() / (own.sum() + other.sum())), turned[0] - max(turned[1:])


def _correlation(a_XYZ: Double, b_XYZ: Double, where: NDArray[np.bool_]) -> float:
    """Over some cells; 0 where nothing varies."""
    a, b = a_XYZ[where], b_XYZ[where]
    return float(np.corrcoef(a, b)[0, 1]) if where.sum() > 2 and a.std() > 0 and b.std() > 0 else 0.0


def _in_cells(image_XYZ: NDArray[Any]) -> Double:
    """Means of an image over the cells of the template, whatever the image's size, (X, Y, Z)."""
    step = np.array(image_XYZ.shape) / np.array(_CELLS)
    smooth_XYZ = ndimage.uniform_filter(image_XYZ.astype(np.float64), np.maximum(1, np.rint(step)).astype(int))
    return ndimage.affine_transform(smooth_XYZ, step, (step - 1) / 2, output_shape=_CELLS, order=1, mode="nearest")


@lru_cache(maxsize=1)
def _template() -> tuple[Double, Double]:
    """Brightness and mask of the ICBM152 brain in cells, from the tissue maps that nilearn ships."""
    import nibabel

    found = find_spec("nilearn")  # which takes seconds to import, and is not needed for a file of its own
    if found is None or found.origin is None:
        raise ModuleNotFoundError("nilearn is not installed", name="nilearn")
    path = Path(found.origin).parent / "datasets" / "data" / "mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
    t1_XYZ = np.asarray(nibabel.as_closest_canonical(nibabel.load(path)).dataobj, dtype=np.float32)[::2, ::2, ::2]
    box = bounding_box(t1_XYZ > 0)
    t1_XYZ = t1_XYZ[box]
    brain_XYZ = _in_cells((t1_XYZ > 0).astype(np.float32))
    return _in_cells(t1_XYZ) / np.maximum(brain_XYZ, 1e-6), brain_XYZ


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
                found.append(_in_words(name, value, low, high))
        if not found and (far := self.distance(sign_S)) > _FAR:
            z_S = (sign_S - self.mean) / self.scale
            worst = int(np.argmax(np.abs(z_S)))
            what = _WORDS.get(SIGNS[worst], SIGNS[worst].replace("_", " "))
            found.append(f"{far:.1f} times the usual distance from training scans, {what} above all")
        return found


def _in_words(name: str, value: float, low: float, high: float) -> str:
    """What is wrong with a sign that lies outside of its bounds.

    >>> _in_words("upright", -0.4, 0.0, 2.0)
    'lies in the template better upside down or back to front'
    >>> _in_words("log_litres", np.log(0.42), np.log(0.85), np.log(2.2))
    'a brain of 0.42 litres, 0.85 to 2.20 in adults'
    """
    if name in _SENTENCES:
        return _SENTENCES[name]
    if name == "log_litres":
        value, low, high = np.exp((value, low, high))
        return f"a brain of {value:.2f} litres, {low:.2f} to {high:.2f} in adults"
    return f"{_WORDS[name]} is {value:.2f}, {low:.2f} to {high:.2f} in adults"
