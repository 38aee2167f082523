"""Modules answer to the names they had, once with a warning, and are the same modules."""

import subprocess
import sys

import pytest

from ermoe._moved import home_of


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("ermoe.data.brain.cohort", "ermoe.brain.data.cohort"),
        ("ermoe.tasks.brain_age.report", "ermoe.brain.reporting.page"),
        ("ermoe.tasks.image.run", "ermoe.images.run"),
        ("ermoe.models.baselines.swin3d", "ermoe.brain.rivals.swin3d"),
        ("ermoe.models.baselines.deep_moe", "ermoe.images.rivals.deep_moe"),
        ("ermoe.bench", "ermoe.studies.bench"),
        ("ermoe.nn.moe", None),
        ("ermoe.data.catalogue", None),
    ],
)
def test_where_modules_went(old, new):
    assert home_of(old) == new


def test_old_names_give_the_same_modules_and_say_where_they_are():
    code = """if True:
        import warnings
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            from ermoe.tasks.image.classification import Classification
            from ermoe.data.brain import splits
            import ermoe.data.brain.options
        import ermoe.images.classification, ermoe.brain.data.splits
        assert Classification is ermoe.images.classification.Classification
        assert splits is ermoe.brain.data.splits
        assert splits.__spec__.name == "ermoe.brain.data.splits"
        messages = [str(warning.message) for warning in said if "ermoe." in str(warning.message)]
        assert "ermoe.tasks.image.classification is ermoe.images.classification now: import it from there" in messages
        print(len(messages), len(set(messages)))
    """
    count, distinct = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert count == distinct, "one warning a module"
