"""What docs/explanation/code.md says of the ways of a batch and of a scan is so, and both are short."""

import ast
import importlib.util
import re
from pathlib import Path

import pytest

import ermoe.images.two_stages
import ermoe.studies.image_command  # noqa: F401  (imports take twice as long while they are followed)

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/explanation/code.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def trace():
    spec = importlib.util.spec_from_file_location("trace_of_ways", ROOT / "tools/trace.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", params=["batch", "scan"])
def way(request, trace, tmp_path_factory):
    """Its name, and the files on it."""
    return request.param, getattr(trace, request.param)(tmp_path_factory.mktemp("way"))


@pytest.mark.no_cover  # other tests run the same lines
def test_the_way_is_short(way, trace):
    _, files = way
    assert 10 < len(files) <= trace.MOST_FILES, "a file more to read, to follow one example"


@pytest.mark.no_cover
def test_the_list_is_the_one_found(way, trace):
    name, files = way
    assert len(trace.packages_entered_again(files)) <= trace.MOST_REENTRIES
    listed = TEXT.partition(f"<!-- trace: {name} -->\n")[2].partition("\n<!-- end -->")[0]
    assert listed == trace.drawn(files), "redraw it: python tools/trace.py docs/explanation/code.md"


def test_the_calls_that_are_named_exist():
    known = set()
    for path in (ROOT / "src/ermoe").rglob("*.py"):
        module = path.relative_to(ROOT / "src/ermoe").with_suffix("").as_posix().replace("/", ".")
        for made in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(made, ast.ClassDef | ast.FunctionDef):
                inner = [one.name for one in getattr(made, "body", []) if isinstance(one, ast.FunctionDef)]
                known |= {f".{module}.{made.name}", *(f".{module}.{made.name}.{name}" for name in inner)}
    sentences = re.findall(r"^The calls: .*?\n\n", TEXT, re.DOTALL | re.MULTILINE)
    named = [name for name in re.findall(r"`([\w.]+)`", " ".join(sentences)) if not name.endswith(".py")]
    assert len(named) > 20
    assert [name for name in named if not any(each.endswith(f".{name}") for each in known)] == []
