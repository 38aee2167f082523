"""Modules, and what is in them, answer to the names they had, with a warning."""

import importlib
import subprocess
import sys

import pytest

from ermoe._moved import home_of
from ermoe.images import presets


def test_old_names_give_the_same_modules_and_say_where_they_are():
    code = """if True:
        import warnings
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            from ermoe.tasks.image.classification import Classification
            from ermoe.data.brain import splits
            import ermoe.data.brain.options
        import ermoe.images.run, ermoe.brain.data.splits
        assert Classification is ermoe.images.run.Classification
        assert splits is ermoe.brain.data.splits
        assert splits.__spec__.name == "ermoe.brain.data.splits"
        messages = [str(warning.message) for warning in said if "ermoe." in str(warning.message)]
        assert "ermoe.tasks.image.classification is ermoe.images.run now: import it from there" in messages
        print(len(messages), len(set(messages)))
    """
    count, distinct = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.split()
    assert count == distinct, "one warning a module"


@pytest.mark.parametrize(
    ("old", "name", "home", "now"),
    [
        ("ermoe.bench.record", "Result", "ermoe.studies.bench.result", "Result"),
        ("ermoe.bench.record", "save", "ermoe.studies.bench.result", "save"),
        ("ermoe.bench.record", "versions", "ermoe.studies.record", "versions"),
        ("ermoe.brain.age_head", "age_head", "ermoe.brain.ages", "stored_head"),
        ("ermoe.tasks.brain_age.age_head", "AgeBins", "ermoe.brain.ages", "AgeBins"),
        ("ermoe.models.scratch", "restart_ffns", "ermoe.models.upcycle", "restart_ffns"),
        ("ermoe.models.scratch", "from_scratch", "ermoe.train.settings", "from_scratch"),
    ],
)
def test_what_parted_from_its_module_is_found_under_the_old_name(old, name, home, now, monkeypatch):
    for module in [module for module in sys.modules if home_of(module)]:  # what other tests imported has warned already
        monkeypatch.delitem(sys.modules, module)
    with pytest.warns(DeprecationWarning, match=rf"{home}\b"):
        module = importlib.import_module(old)
    assert getattr(module, name) is getattr(importlib.import_module(home), now)


def test_the_recipe_of_images_answers_to_the_name_it_had():
    with pytest.warns(DeprecationWarning, match="ermoe.images.presets.Recipe is ImageRecipe now") as said:
        assert presets.Recipe is presets.ImageRecipe
    assert said[0].filename == __file__
    with pytest.raises(AttributeError, match="has no attribute 'Recipy'"):
        presets.Recipy  # noqa: B018
