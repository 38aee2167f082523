"""Which preset the values of a command come from."""

from dataclasses import replace

import pytest
from rich.console import Console

from ermoe.console import parse_command
from ermoe.errors import UserError
from ermoe.images import commands as images
from ermoe.retrieval import commands as retrieval


@pytest.mark.parametrize(
    ("kind", "argv", "preset"),
    [
        (images.Train, ["--out", "digits-dense", "digits-ermoe", "digits"], "digits-ermoe"),
        (images.Train, ["--check", "digits-ermoe", "digits-dense"], "digits-ermoe"),
        (images.Train, ["digits-ermoe", "digits", "--weights=x", "--epochs", "3"], "digits-ermoe"),
        (retrieval.Train, ["--text-from", "tiny-dense", "tiny-ermoe", "shapes"], "tiny-ermoe"),
        (retrieval.Train, ["--cache", "tiny-ermoe", "tiny-dense"], "tiny-ermoe"),
    ],
)
def test_it_is_the_one_in_the_place_of_the_preset(kind, argv, preset):
    command = parse_command(kind, argv, prog="train")
    assert (command.preset, command.recipe.preset) == (preset, preset)


@pytest.mark.parametrize(("kind", "other"), [(images.Train, "digits-dense"), (retrieval.Train, "tiny-dense")])
def test_no_preset_is_trained_with_the_values_of_another(kind, other):
    usual = parse_command(kind, [other, "data"], prog="train")
    with pytest.raises(UserError, match=f"with the values of {other}"):
        replace(usual, preset=other.replace("dense", "ermoe"))(Console(quiet=True))


def test_help_shows_the_values_of_the_preset(capsys):
    for argv in (["digits-dense", "--help"], ["--out", "cifar-dense", "digits-dense", "--help"]):
        with pytest.raises(SystemExit):
            parse_command(images.Train, argv, prog="train")
        assert "(default: 0.012)" in capsys.readouterr().out
