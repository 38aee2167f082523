"""Stages of a brain-age run, before any of them learns."""

import typing
from types import SimpleNamespace

import pytest

import ermoe
from ermoe.brain import run
from ermoe.brain.learning import is_learnt
from ermoe.brain.recipes import recipe
from ermoe.errors import UserError


def test_a_save_that_was_killed_is_not_taken_for_a_model(tmp_path):
    (tmp_path / "model").mkdir()
    assert not is_learnt(tmp_path)
    (tmp_path / "model" / "model.safetensors").touch()
    assert not is_learnt(tmp_path)
    (tmp_path / "model" / "config.json").touch()
    assert is_learnt(tmp_path)


@pytest.mark.parametrize("preset", ["tiny", recipe("tiny", "vit3d")])
def test_a_recipe_of_ones_own_is_changed_as_a_preset_is(preset, tmp_path, monkeypatch):
    def see(chosen):
        seen.append(chosen)
        return {}

    def stop(run, resume):
        raise KeyboardInterrupt

    seen = []
    monkeypatch.setattr(run, "open_cohort", lambda path, options: SimpleNamespace(with_age=()))
    monkeypatch.setattr(run, "_trainable", lambda cohort, compute, check_for: [])
    monkeypatch.setattr(run, "state_of", lambda scans: "")
    monkeypatch.setattr(run, "to_json", see)
    monkeypatch.setattr(run, "_check_resume", stop)
    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path, tmp_path / "run", preset=preset, method="ermoe", epochs=9, sigma=3.0)
    assert seen[-1] == recipe("tiny", "ermoe", epochs=9, sigma=3.0)
    with pytest.raises(KeyboardInterrupt):
        run.train(tmp_path, tmp_path / "run", preset=preset)
    assert seen[-1].method == ("ermoe" if preset == "tiny" else "vit3d")
    with pytest.raises(UserError, match="there is no option 'epoch'"):
        run.train(tmp_path, tmp_path / "run", preset=preset, epoch=9)


def test_the_call_of_development_versions_works_with_a_warning(monkeypatch):
    calls = []

    class Trained:
        facts: typing.ClassVar = {"raw": {"mae": 3.0}}

    monkeypatch.setattr("ermoe.brain.run.train", lambda *given, **options: calls.append((given, options)) or Trained())
    assert ermoe.brain.train("tiny-ermoe", "bids", "run", folds=2) == {"mae": 3.0}
    assert ermoe.brain.train("tiny-ermoe", "bids", folder="run") == {"mae": 3.0}
    assert ermoe.brain.train(preset="tiny-ermoe", data="bids", folder="run") == {"mae": 3.0}
    for given, options in ((("bids", "run"), {"preset": "tiny"}), (("bids",), {"folder": "run"})):
        with pytest.warns(DeprecationWarning, match=r"ermoe\.brain\.load"):
            assert isinstance(ermoe.brain.train(*given, **options), ermoe.brain.Estimator)
        assert calls[-1] == (given, options)
