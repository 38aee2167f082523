"""Every table and figure of the documents says what the records say; `make tables` writes them."""

import sys
from pathlib import Path

import pytest

from ermoe.errors import UserError
from ermoe.studies.tables import Table, filled_in

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
DOCUMENTS = [BENCHMARKS.parent / "README.md", *sorted((BENCHMARKS.parent / "docs").rglob("*.md"))]


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        import tables

        yield tables
        for name in [name for name, module in sys.modules.items() if _is_script(module)]:
            del sys.modules[name]


def _is_script(module):
    return str(getattr(module, "__file__", None) or "").startswith(str(BENCHMARKS))


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_tables_and_records_agree(tables, document):
    assert document.read_text(encoding="utf-8") == tables.written_anew(document), "run `make tables`"


def test_every_table_and_figure_is_shown_somewhere(tables):
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    assert [name for name in tables.TABLES if f"<!-- table: {name} -->" not in text] == []
    assert [name for name in tables.figures.FIGURES if f"<!-- figure: {name} -->" not in text] == []


def test_a_table_that_disagrees_is_written_anew_in_its_place():
    text = "- a list\n\n  <!-- table: x -->\n\n  | a |\n\n  <!-- end of table -->\n  more\n"
    anew = filled_in(text, {"x": lambda: Table(["a", "b"], [["1", "2"]])})
    table = "  | a | b |\n  | :-- | --: |\n  | 1 | 2 |\n"
    assert anew == f"- a list\n\n  <!-- table: x -->\n\n{table}\n  <!-- end of table -->\n  more\n"
    with pytest.raises(UserError, match="there is no table 'x': use one of y"):
        filled_in(text, {"y": lambda: Table([], [])})
