"""Whether everything that bears the version is ready for the tag of a release: python tools/check_release.py v0.1.0

Standard library alone, because it runs before anything is installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACEHOLDER = ".example"


def version(root: Path) -> str:
    """What ``src/ermoe/_version.py`` says, which is the only place that decides it."""
    found = re.search(r'^__version__ = "(.+)"$', (root / "src/ermoe/_version.py").read_text(), re.MULTILINE)
    assert found, "src/ermoe/_version.py says no version"
    return found[1]


def obstacles(tag: str, root: Path) -> list[str]:
    """What keeps ``tag`` from being a release, each in a sentence; empty if nothing does."""
    number = version(root)
    changelog, citation = (root / "CHANGELOG.md").read_text(), (root / "CITATION.cff").read_text()
    addresses = re.findall(r"https://[\w./-]+", (root / "pyproject.toml").read_text())
    wanted = {
        f"the tag is {tag}, and src/ermoe/_version.py says {number}: they must agree": tag == f"v{number}",
        f"{number} is no release: take what follows the three numbers away": re.fullmatch(r"\d+\.\d+\.\d+", number),
        f"CHANGELOG.md has no line '## [{number}] - YYYY-MM-DD'": re.search(
            rf"^## \[{re.escape(number)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.MULTILINE
        ),
        f"CITATION.cff has no line 'version: {number}'": f"\nversion: {number}\n" in citation,
        "CITATION.cff has no line 'date-released: YYYY-MM-DD'": re.search(
            r"^date-released: \d{4}-\d\d-\d\d$", citation, re.MULTILINE
        ),
        "pyproject.toml: [project.urls] still holds a placeholder": PLACEHOLDER not in " ".join(addresses),
        "CITATION.cff still holds a placeholder for its address": PLACEHOLDER not in citation,
    }
    return [sentence for sentence, holds in wanted.items() if not holds]


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    found = obstacles(sys.argv[1], ROOT)
    sys.exit("\n".join(found) if found else 0)
