"""What `ermoe image train` settles before it trains."""

import json
from dataclasses import replace

import pytest

from ermoe.errors import UserError
from ermoe.images import run
from ermoe.images.presets import recipe
from ermoe.train import loop


@pytest.fixture
def train(monkeypatch):
    """Everything but the training."""

    class ClaimedError(Exception):
        """The folder is the run's, and training would begin."""

    def begin(*given):
        raise ClaimedError

    def claim(*given, **options):
        with pytest.raises(ClaimedError):
            run.train(*given, **options)

    monkeypatch.setattr(loop.Trainer, "build", begin)
    return claim


def test_the_classes_are_there_before_the_first_step_and_others_are_refused(tmp_path, train):
    train("digits-dense", "digits", tmp_path)
    names = json.loads((tmp_path / "classes.json").read_text())
    assert names == [str(digit) for digit in range(10)]
    train("digits-dense", "digits", tmp_path, log_every=7)
    (tmp_path / "classes.json").write_text(json.dumps(names[::-1]))
    with pytest.raises(UserError, match="other classes"):
        run.train("digits-dense", "digits", tmp_path)


def test_a_refused_folder_is_left_as_it_was(tmp_path, train):
    train("digits-dense", "digits", tmp_path)
    (tmp_path / "classes.json").unlink()
    with pytest.raises(UserError, match="another configuration"):
        run.train("digits-dense", "digits", tmp_path, epochs=3)
    assert not (tmp_path / "classes.json").exists()


def test_a_start_from_random_weights_where_pretrained_ones_belong_is_pointed_out(tmp_path, train, caplog):
    train("digits-dense", "digits", tmp_path / "random")
    assert not caplog.text
    train(replace(recipe("digits-ermoe"), init="dense"), "digits", tmp_path / "dense")
    assert "starts from random ones: give --weights" in caplog.text
