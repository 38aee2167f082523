"""One grammar: what is required is positional, model before data; words mean the same; old spellings get a sentence."""

import typing
from dataclasses import MISSING, fields

import pytest
import tyro

from ermoe.brain import recipes as brain
from ermoe.cli.main import every_command, main, run
from ermoe.errors import UserError
from ermoe.images import presets as images
from ermoe.options import as_typed
from ermoe.retrieval import presets as retrieval
from ermoe.studies.image_command import Comparison
from ermoe.studies.paper.setup import Setup

COMMANDS = dict(every_command())
MODELS, DATA = {"model", "models", "preset"}, {"data", "images", "scans", "bids_dir"}


def annotated(kind):
    return {name: getattr(hint, "__metadata__", ()) for name, hint in hints(kind).items()}


def hints(kind):
    return typing.get_type_hints(as_typed(kind), include_extras=True)


@pytest.mark.parametrize("name", [name for name in COMMANDS if name != "brain app"])  # whose words BIDS prescribes
def test_what_is_required_is_positional_and_the_model_comes_first(name):
    kind = COMMANDS[name]
    words = [field.name for field in fields(kind) if tyro.conf.Positional in annotated(kind)[field.name]]
    required = [field.name for field in fields(kind) if field.default is MISSING and field.default_factory is MISSING]
    assert set(required) - {"recipe"} <= set(words)
    first = [0 if word in MODELS else 1 for word in words if word in MODELS | DATA]
    assert first == sorted(first)
    assert "data" not in words or "data" in required


@pytest.mark.parametrize("name", COMMANDS)
def test_options_that_many_have_are_of_one_kind(name):
    def flat(kind):
        for option, hint in hints(kind).items():
            bare = typing.get_args(hint)[0] if hasattr(hint, "__metadata__") else hint
            yield from flat(bare) if hasattr(bare, "__dataclass_fields__") else [(option, str(bare))]

    shared = {
        "out": ("Path",), "seed": ("int",), "seeds": ("tuple[int, ...]",), "threads": ("int",), "config": ("Path",),
        "device": ("Literal['auto', 'cpu', 'cuda', 'mps']",),
    }  # fmt: skip
    for option, hint in flat(COMMANDS[name]):
        assert any(kind in hint for kind in shared.get(option, ("",))), (option, hint)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ("image eval RUN digits", "ermoe image evaluate"),
        ("retrieve eval RUN DATA", "ermoe retrieve evaluate"),
        ("retrieve classify RUN a.png", "ermoe retrieve predict"),
        ("brain doctor BIDS", "ermoe brain check"),
        ("brain train .", "ermoe brain train small-ermoe DATA"),
        ("brain train BIDS --preset tiny", "ermoe brain train small-ermoe DATA"),
        ("brain train BIDS --method=ridge", "ermoe brain train small-ermoe DATA"),
        ("brain predict RUN BIDS --no-report", "--no-pages"),
        ("brain synthesize OUT --subjects 3", "--out OUT"),
        ("upcycle vit photographs", "--data photographs"),
        ("retrieve convert PRESET FILE FOLDER", "--out FOLDER"),
        ("retrieve search INDEX dogs --html a.html", "--report FILE"),
        ("image study cifar-dense --data cifar", "PRESET… DATA"),
        ("push MODEL me/model --private True", "--visibility private"),
        ("bench layer --threads 1 2", "run it once for each"),
    ],
)
def test_an_old_spelling_is_answered_with_the_one_of_today(words, sentence, capsys):
    assert main(words.split()) == 2
    shown = capsys.readouterr()
    assert sentence in shown.err
    assert len(shown.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("command", "known", "methods"),
    [
        ("image", images.PRESETS, images.ABOUT_METHODS),
        ("brain", brain.PRESETS, brain.ABOUT_METHODS),
        ("retrieve", retrieval.PRESETS, retrieval.ABOUT_METHODS),
    ],
)
def test_presets_are_listed_and_described(command, known, methods, capsys):
    assert main([command, "presets"]) == 0
    listed = capsys.readouterr().out.replace(",", " ").split()
    assert set(known) <= set(listed)
    suffixes = tuple(f"-{method.removeprefix('…-')}" for method in methods)
    assert all(name.endswith(suffixes) for name in known)


@pytest.mark.parametrize(
    ("recipe", "wrong", "right"),
    [
        (images.recipe, "cifar-ermo", "cifar-ermoe"),
        (brain.recipe, "smal-sfcn", "small-sfcn"),
        (retrieval.recipe, "tiny-vmoe", "tiny-v-moe"),
    ],
)
def test_a_misspelt_preset_gets_the_nearest(recipe, wrong, right):
    with pytest.raises(UserError, match=rf"did you mean {right}\? ermoe \w+ presets lists them"):
        recipe(wrong)


@pytest.mark.parametrize("words", [("digits",), ("digits-dense", "digits", "--seeds"), ()])
def test_empty_studies_are_refused(words):
    with pytest.raises((UserError, SystemExit)):
        run(["image", "study", *words])


def test_studies_without_seeds_are_refused():
    with pytest.raises(UserError, match="a study needs a preset"):
        Comparison(("digits-dense", "digits"), seeds=())
    with pytest.raises(UserError, match="need at least one"):
        Setup(seeds=())
