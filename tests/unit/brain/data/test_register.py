"""The grid on which registered scans lie."""

import pytest

pytest.importorskip("nibabel")
pytest.importorskip("nilearn")
pytest.importorskip("dipy")

from ermoe.brain.data.register import mni_grid
from ermoe.errors import UserError


def test_a_grid_too_small_for_the_mni_brain_is_refused():
    with pytest.raises(UserError, match="too small for the MNI brain"):
        mni_grid(2.0, (32, 32, 32))
