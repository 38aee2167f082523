"""What a call asks for: a misspelt option is named, and nothing that was asked for is dropped."""

import json

import pytest

from ermoe.brain import recipes as brain
from ermoe.errors import UserError
from ermoe.images import presets as images
from ermoe.images.run import Classification
from ermoe.train.compute import Compute
from ermoe.train.loop import means_among
from ermoe.train.run_folder import RunFolder
from ermoe.train.settings import Training, changed


def test_options_of_a_recipe_and_of_its_training():
    chosen = changed(images.recipe("digits-dense"), {"epochs": 3, "label_smoothing": 0.0})
    assert (chosen.training.epochs, chosen.label_smoothing) == (3, 0.0)
    assert changed(chosen, {"training": Training(epochs=7), "seed": 5}).training == Training(epochs=7, seed=5)


def test_a_misspelt_option_is_one_sentence():
    with pytest.raises(UserError, match="there is no option 'epoch': did you mean epochs"):
        changed(images.recipe("digits-dense"), {"epoch": 3})
    with pytest.raises(UserError, match="there is no option 'hed': did you mean head"):
        brain.recipe("tiny", hed="bins")


def test_compute_and_a_part_of_it_contradict_each_other():
    compute = Compute(workers=1)
    assert means_among({"epochs": 3}, compute) == (compute, {"epochs": 3})
    with pytest.raises(UserError, match=r"compute= and workers=: give one"):
        means_among({"workers": 4}, compute)


def test_no_task_is_judged_besides_unless_it_says_so():
    assert Classification.judged_after == ()


def test_a_folder_without_a_configuration_is_no_model(tmp_path):
    run = RunFolder(tmp_path)
    run.final.mkdir()
    with pytest.raises(UserError, match="has no model yet"):
        run.model()
    run.best.mkdir(parents=True)
    (run.best / "config.json").write_text(json.dumps({}))
    assert run.model() == run.best
