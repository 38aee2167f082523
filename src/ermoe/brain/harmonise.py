"""What a site adds to the measures of a scan, taken off before a ridge reads age from them.

Scanners, protocols and tools shift measures. Least squares over the training people of a fold,

    measure = what the site adds + slope · age + sex,

tell the site from the ages of the people scanned there, as far as sites share ages. What a site adds beyond the mean
of all is subtracted. A site that was not in training stays as it is: nothing is known of it.

Letters: N scans, F measures, L sites.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ermoe.brain.data.scans import Scan
from ermoe.errors import UserError

Double = NDArray[np.float64]
Offsets = Mapping[str, tuple[float, ...]]
"""What each site adds to each measure."""
_FEWEST_PEOPLE = 8
"""Of a site, below which its offset would be mostly those people's own."""
_MALE = {"M": 1.0, "F": 0.0}


def fit_offsets(measure_NF: Double, scans: Sequence[Scan], column: str) -> dict[str, tuple[float, ...]]:
    """Offsets of the sites that have people enough, from scans of known age.

    >>> from pathlib import Path
    >>> scans = [Scan(f"sub-{n}", None, Path(), age=40.0 + n, sex="F", site="AB"[n % 2]) for n in range(20)]
    >>> measure_NF = np.array([[scan.age + (6.0 if scan.site == "B" else 0.0)] for scan in scans])
    >>> {site: round(*offset, 3) for site, offset in fit_offsets(measure_NF, scans, "site").items()}
    {'A': -3.0, 'B': 3.0}
    """
    sites = [scan.value(column) for scan in scans]
    people = {
        site: {scan.participant_id for scan, own in zip(scans, sites, strict=True) if own == site} for site in sites
    }
    known = sorted(site for site, own in people.items() if site is not None and len(own) >= _FEWEST_PEOPLE)
    if len(known) < 2:
        raise UserError(
            f"--harmonise {column}: {len(known)} of its values have {_FEWEST_PEOPLE} people or more to learn from, and "
            "it takes two: leave it out, or use --split k-fold"
        )
    rows = [number for number, site in enumerate(sites) if site in known]
    is_at_NL = np.array([[sites[number] == site for site in known] for number in rows], dtype=np.float64)
    about_N2 = np.array([[scans[number].age, _MALE.get(str(scans[number].sex), 0.5)] for number in rows], np.float64)
    design = np.hstack([is_at_NL, about_N2 - about_N2.mean(0)])
    effect_LF = np.linalg.lstsq(design, measure_NF[rows], rcond=None)[0][: len(known)]
    effect_LF -= is_at_NL.mean(0) @ effect_LF
    return {site: tuple(effect_F.tolist()) for site, effect_F in zip(known, effect_LF, strict=True)}


def without_offsets(measure_NF: Double, sites: Sequence[str | None], offsets: Offsets) -> Double:
    """Measures without what their sites add; those of an unknown site as they are."""
    none_F = np.zeros(measure_NF.shape[1])
    return measure_NF - np.array([offsets.get(site, none_F) if site is not None else none_F for site in sites])
