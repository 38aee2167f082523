"""Commands, options and names that the documents mention exist."""

import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted(ROOT.glob("docs/**/*.md"))]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.fixture(scope="module")
def site():
    """What the site is built with: the options of commands, and names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "docs/_ext"))
        import commands
        import names

        yield commands, names
        for module in ("commands", "names"):
            del sys.modules[module]


def calls():
    """Every call of ermoe in a block of shell, as words, with its page."""
    for page in PAGES:
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE):
            for line in block.replace("\\\n", " ").splitlines():
                found = re.search(r"(?:^|-m )ermoe (\w.*?)(?:#.*)?$", line)
                if found:
                    yield name_of(page), found[1].split()


def test_commands_and_options_exist(site):
    commands, _ = site
    known = dict.fromkeys(commands.every_command())
    wrong = []
    for page, words in calls():
        command = tuple(words[:2]) if tuple(words[:2]) in known else tuple(words[:1])
        if command not in known:
            wrong.append((page, " ".join(words)))
            continue
        if known[command] is None:
            parser = commands.parser_of(command)
            known[command] = {name for _, action in commands.options(parser) for name in action.option_strings}
        options = {word.split("=")[0] for word in words if word.startswith("--")} - {"--help"}
        wrong += [(page, " ".join(command), option) for option in options - known[command]]
    assert wrong == []


def test_names_in_text_exist(site):
    _, names = site
    mentioned = {
        name: name_of(page)
        for page in PAGES
        for name in re.findall(r"`(ermoe(?:\.\w+)+)(?:\([^`]*\))?`", page.read_text(encoding="utf-8"))
    }
    wrong = []
    for name, page in mentioned.items():
        try:
            names.found(name)
        except (AttributeError, ImportError):
            wrong.append((page, name))
    assert wrong == []
