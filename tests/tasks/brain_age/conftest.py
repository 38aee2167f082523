"""A run from a synthetic cohort to an estimator, made once for all tests."""

import pytest


@pytest.fixture(scope="session")
def cohort_root(tmp_path_factory):
    """Twelve coarse phantoms as a BIDS data set."""
    for package in ("nibabel", "nilearn", "monai"):
        pytest.importorskip(package)
    from ermoe.data.brain.phantom import synthesize

    return synthesize(tmp_path_factory.mktemp("phantoms") / "bids", 12, spacing_mm=6.0)


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One cache for all runs."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def finished(cohort_root, cache, tmp_path_factory):
    """A finished three-fold run of the tiny preset."""
    from rich.console import Console

    from ermoe.tasks.brain_age.run import train

    folder = tmp_path_factory.mktemp("runs") / "ermoe"
    train(cohort_root, folder, preset="tiny", folds=3, cache=cache, console=Console(quiet=True))
    return folder
