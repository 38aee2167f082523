"""axe-core, which says where a page shuts people out."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_WANTED = {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}


def axe_script(folder):
    """The script as npm has it, or the file that AXE_CORE names; skips the test where there is neither."""
    if named := os.environ.get("AXE_CORE"):
        return Path(named).read_text(encoding="utf-8")
    if shutil.which("npm") is None:
        pytest.skip("needs npm, to fetch axe-core with")
    fetched = subprocess.run(
        ["npm", "install", "--prefix", str(folder), "axe-core@4"], capture_output=True, timeout=120
    )
    if fetched.returncode:
        pytest.skip("npm cannot fetch axe-core here")
    return (folder / "node_modules" / "axe-core" / "axe.min.js").read_text(encoding="utf-8")


def violations(browser, script):
    """What axe finds wrong with the page, a line each."""
    browser.evaluate(f"{script};0")
    wanted = '{"runOnly": ' + str(_WANTED).replace("'", '"') + "}"
    expression = (
        f"axe.run(document, {wanted}).then(found => found.violations.flatMap("
        "v => v.nodes.map(n => `${v.id}: ${n.target} ${n.failureSummary}`)))"
    )
    return browser.evaluate(expression)
