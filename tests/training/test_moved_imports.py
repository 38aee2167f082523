"""Modules answer to the names they had, once with a warning, and are the same modules."""

import subprocess
import sys


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
