"""Every option of every command has a text; values are shown before a run, written to a file and read back."""

import json
import typing
from dataclasses import fields, is_dataclass

import pytest
import tyro

from ermoe.cli.main import every_command, main
from ermoe.console import parse_command
from ermoe.errors import UserError
from ermoe.images.commands import Train
from ermoe.options import as_typed

COMMANDS = dict(every_command())


def described(kind):
    """(Name, what tyro is told of it) of every field that is an option, those of settings within too."""
    hints = typing.get_type_hints(kind, include_extras=True)
    for field in fields(kind):
        bare, *notes = (
            typing.get_args(hints[field.name]) if hasattr(hints[field.name], "__metadata__") else (hints[field.name],)
        )
        if tyro.conf.Suppress in notes:
            continue
        if isinstance(bare, type) and is_dataclass(bare):
            yield from described(bare)
        else:
            yield field.name, notes


@pytest.mark.parametrize("name", COMMANDS)
def test_every_option_has_a_text(name):
    for option, notes in described(as_typed(COMMANDS[name])):
        texts = [text for note in notes if (text := getattr(note, "help", None))]
        assert texts, f"ermoe {name}: {option}"
        assert texts[-1].endswith("."), texts[-1]


@pytest.mark.parametrize("name", COMMANDS)
def test_help_is_for_people(name, capsys):
    with pytest.raises(SystemExit):
        parse_command(COMMANDS[name], ["--help"], prog=f"ermoe {name}")
    shown = capsys.readouterr().out
    for machine_talk in ("{None", "None)", "[STR", "(default: )", "(default: '')"):
        assert machine_talk not in shown
    assert ("--config PATH" in shown) == ("--print-config" in shown) == bool(fields(COMMANDS[name]))


def typed(*words):
    return parse_command(Train, list(words), prog="ermoe image train")


def printed(words, capsys):
    with pytest.raises(SystemExit) as stop:
        typed(*words, "--print-config")
    assert stop.value.code == 0
    return json.loads(capsys.readouterr().out)


def test_printed_values_are_read_back(tmp_path, capsys):
    words = ["digits-v-moe", "digits", "--epochs", "3", "--out", "here", "--threads", "1"]
    file = tmp_path / "values.json"
    file.write_text(json.dumps(printed(words, capsys)))
    assert typed("--config", str(file)) == typed(*words)
    changed = typed("--config", str(file), "--epochs", "5")
    assert (changed.recipe.training.epochs, changed.preset, changed.machine.threads) == (5, "digits-v-moe", 1)


def test_a_few_values_by_the_names_of_options_are_enough(tmp_path):
    file = tmp_path / "values.json"
    file.write_text(json.dumps({"preset": "digits-dense", "data": "digits", "batch-size": 8, "label_smoothing": 0}))
    read = typed("--config", str(file))
    assert read == typed("digits-dense", "digits", "--batch-size", "8", "--label-smoothing", "0")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"epoch": 3}, "there is no option 'epoch': did you mean epochs"),
        ({"epochs": "many"}, 'epochs = "many": need int'),
        ({"epochs": True}, "epochs = true: need int"),
        ({"device": "gpu"}, 'device = "gpu": need auto, cpu, cuda, mps'),
        ({"epochs": 0}, "epochs=0: need at least 1"),
        ({"command": "ermoe brain train"}, "holds the values of ermoe brain train, not of ermoe image train"),
        ([1], "it holds no object"),
    ],
)
def test_a_mistake_in_a_file_is_one_sentence(values, message, tmp_path):
    file = tmp_path / "values.json"
    file.write_text(json.dumps(values))
    with pytest.raises(UserError, match=message) as mistake:
        typed("digits-dense", "digits", "--config", str(file))
    assert "\n" not in str(mistake.value)


def test_a_file_that_is_not_there(capsys):
    assert main(["demo", "--config", "nowhere.json"]) == 2
    assert "nowhere.json" in capsys.readouterr().err
