"""Where modules went. That they still answer to their old names: training/test_moved_imports.py."""

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
        ("ermoe.data.catalogue", "ermoe.data.images"),
        ("ermoe.data.images", None),
    ],
)
def test_where_modules_went(old, new):
    assert home_of(old) == new
