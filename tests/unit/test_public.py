"""What the packages offer: few names, each documented, none of them the name of a module."""

import importlib
import inspect
import pkgutil
import re
import sys
import warnings

import pytest

APPLICATIONS = ("ermoe.images", "ermoe.brain", "ermoe.retrieval")
PUBLIC = ("ermoe", "ermoe.nn", *APPLICATIONS)


@pytest.mark.parametrize("package", PUBLIC)
def test_every_public_name_has_a_text(package):
    module = importlib.import_module(package)
    for name in module.__all__:
        offered = getattr(module, name)
        assert inspect.getdoc(offered), f"{package}.{name}"
        assert name in dir(module)
        if inspect.isfunction(offered):
            given = inspect.signature(offered)
            assert given.return_annotation is not inspect.Signature.empty
            assert all(own.annotation is not own.empty for own in given.parameters.values()), f"{package}.{name}"


@pytest.mark.parametrize("package", APPLICATIONS)
def test_every_application_offers_the_same(package):
    module = importlib.import_module(package)
    assert {"train", "evaluate", "predict", "inspect", "recipe"} <= set(module.__all__)
    words = {name: list(inspect.signature(getattr(module, name)).parameters) for name in module.__all__}
    assert words["train"][:3] == ["preset", "data", "folder"]
    assert words["evaluate"][:2] == ["model", "data"]
    assert words["predict"][0] == "model"
    assert words["inspect"][:3] == ["models", "data", "out"]
    assert all("compute" in words[name] for name in ("evaluate", "predict"))


@pytest.mark.parametrize("package", APPLICATIONS)
@pytest.mark.parametrize("name", ["train", "evaluate", "predict", "inspect"])
def test_every_argument_of_an_application_has_a_text(package, name):
    function = getattr(importlib.import_module(package), name)
    described = re.findall(r"^ {4}([\w, ]+): ", inspect.getdoc(function).partition("Args:")[2], re.MULTILINE)
    named = {argument for names in described for argument in names.split(", ")}
    assert set(inspect.signature(function).parameters) <= named


@pytest.mark.parametrize("package", PUBLIC)
def test_no_function_bears_the_name_of_a_module(package):
    module = importlib.import_module(package)
    below = {found.name for found in pkgutil.iter_modules(module.__path__)}
    assert not below & set(module.__all__)


def test_a_module_that_became_a_function_is_both(monkeypatch):
    import ermoe.images

    monkeypatch.delitem(sys.modules, "ermoe.images.predict", raising=False)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        from ermoe.images.predict import class_names
    assert "ermoe.images.predicting" in str(said[0].message)
    assert class_names("", 2) == ["0", "1"]
    assert callable(ermoe.images.predict)
    monkeypatch.delattr(ermoe.images, "predict", raising=False)
    assert inspect.isfunction(ermoe.images.predict)
