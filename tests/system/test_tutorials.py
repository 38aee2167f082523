"""Each tutorial runs as printed, from start to end, in an empty folder, in the time that it states."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TUTORIALS = sorted(path for path in (ROOT / "docs/tutorials").glob("*.md") if path.stem != "index")
STATED = dict(re.findall(r"\]\(([\w-]+)\.md\) \| (\d+) minutes", (ROOT / "docs/tutorials/index.md").read_text("utf-8")))
# Python of a page is one session, as a reader would have it: what a block leaves is there for the next one.
SESSION = """
import pathlib, sys
names = {}
for line in sys.stdin:
    exec(compile(pathlib.Path(line.strip()).read_text(encoding="utf-8"), line.strip(), "exec"), names)
    print("done", flush=True)
"""


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return re.findall(r"^```(sh|python)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture
def session(tmp_path):
    """A Python that runs files whose names it is told, one after the other."""
    with subprocess.Popen(
        [sys.executable, "-c", SESSION], cwd=tmp_path, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        yield child
        child.stdin.close()


def run_python(session, file):
    session.stdin.write(f"{file}\n")
    session.stdin.flush()
    for line in session.stdout:
        if line == "done\n":
            return
        print(line, end="")
    pytest.fail(f"{file} ended the session")


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_printed(page, tmp_path, session):
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "NO_COLOR": "1"}
    start = time.monotonic()
    for number, (kind, code) in enumerate(blocks(page)):
        if code.startswith("pip install"):
            continue
        file = tmp_path / f"block{number}.{'py' if kind == 'python' else 'sh'}"
        file.write_text(code, encoding="utf-8")
        if kind == "python":
            run_python(session, file)
        else:
            subprocess.run(["sh", "-e", str(file)], cwd=tmp_path, env=env, check=True)
    minutes = (time.monotonic() - start) / 60
    print(f"{page.stem}: {minutes:.1f} minutes, {STATED[page.stem]} stated")
