"""The words and numbers that the methods section of a paper needs of a model, to be pasted."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

from ermoe._version import __version__
from ermoe.brain.model import BrainAgeModel

_LIBRARIES = ("torch", "nibabel", "nilearn", "deepbet")


def numbers(model: BrainAgeModel) -> dict[str, str]:
    """The four that say how good a model is: people, error, correlation, and what its intervals hold."""
    facts, raw = model.facts, model.facts["raw"]
    coverage = facts["interval_coverage"]
    return {
        "people in training": str(facts["num_people"]),
        "MAE of people held out": f"{raw['mae']:.2f} years",
        "their r": f"{raw['r']:.2f}",
        "ages inside 90 % intervals": "no intervals" if coverage is None else f"{coverage:.0%}",
    }


def paragraph(model: BrainAgeModel, command: str) -> str:
    """Command, versions, data and splits, in sentences."""
    facts, raw = model.facts, model.facts["raw"]
    (low, high), spacing = model.age_range, model.preprocessing.spacing_mm
    found = numbers(model)
    libraries = ", ".join(f"{name} {known}" for name in _LIBRARIES if (known := _version(name)))
    space = "in MNI space (affine)" if model.preprocessing.register == "affine" else "in the scanner's axes"
    recalibrated = "" if model.recalibration is None else f" The model was {model.recalibration.in_words()}."
    columns = sorted({column for ridges in model.own_ridges.values() if ridges.own for column in ridges.columns})
    own = f" Ridges of their own were fitted for the levels of {', '.join(columns)}." if columns else ""
    return (
        f"Brain age was estimated from T1-weighted MRI with ermoe {__version__} ({libraries}) by `{command}`. "
        f"The model ({facts['method']}, seed {facts['seed']}) was fitted to {facts['num_people']} people "
        f"({facts['num_scans']} scans) of {facts['data']}, {low:.0f} to {high:.0f} years old, split by person "
        f"({facts['split']}, {len(model.folds)} folds). People held out had a mean absolute error of {raw['mae']:.2f} "
        f"years (r = {raw['r']:.2f}, slope {raw['slope']:.2f}); of their ages, 90 % prediction intervals held "
        f"{found['ages inside 90 % intervals']}. Scans were resampled to {spacing:g} mm {space}, and normalised "
        f"inside the brain mask ({model.preprocessing.normalisation}; masks in training: "
        f"{', '.join(model.mask_sources)})."
        f"{own}{recalibrated} Predictions are raw; tests of the gap should have age as a covariate."
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
