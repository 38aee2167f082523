"""``{example} NAME``: a script of ``examples/``, its text, its code and, with ``ERMOE_DOCS_RUN`` set, what it gives."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

EXAMPLES = Path(__file__).parents[2] / "examples"
TIMEOUT_SECONDS = 600


def parts(script: Path) -> tuple[str, str]:
    """The docstring of a script, and the rest of it."""
    source = script.read_text(encoding="utf-8")
    first = ast.parse(source).body[0]
    text = ast.get_docstring(ast.parse(source)) or ""
    return text, "\n".join(source.splitlines()[first.end_lineno :]).strip("\n")


def outcome(script: Path, pictures: Path) -> tuple[str, list[Path]]:
    """What the script prints, and the pictures it writes; raises if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        run = subprocess.run(
            [sys.executable, str(script)],
            cwd=folder,
            env={**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_SECONDS,
        )
        if run.returncode:
            raise RuntimeError(f"{script.name} ended with exit code {run.returncode}: {run.stderr[-2000:]}")
        pictures.mkdir(parents=True, exist_ok=True)
        kept = [pictures / f"{script.stem}-{found.name}" for found in sorted(Path(folder).glob("*.png"))]
        for target in kept:
            shutil.copy(Path(folder) / target.name.removeprefix(f"{script.stem}-"), target)
    return run.stdout, kept


class Example(SphinxDirective):
    """The directive."""

    required_arguments = 1

    def run(self) -> list[nodes.Node]:
        script = EXAMPLES / f"{self.arguments[0]}.py"
        self.env.note_dependency(str(script))
        text, code = parts(script)
        body = f"{_without_calls(text)}\n\n```python\n{code}\n```\n"
        if os.environ.get("ERMOE_DOCS_RUN"):
            printed, pictures = outcome(script, Path(self.env.srcdir) / "_build" / "gallery")
            body += f"\nIt prints:\n\n```text\n{printed.rstrip()}\n```\n"
            body += "".join(f"\n![{path.stem}](/_build/gallery/{path.name})\n" for path in pictures)
        return self.parse_text_to_nodes(body)


def _without_calls(text: str) -> str:
    """The docstring without its indented command, which becomes a block."""
    lines = [f"```sh\n{line.strip()}\n```" if line.startswith("    ") else line for line in text.splitlines()[1:]]
    return "\n".join([text.splitlines()[0], *lines])


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.add_directive("example", Example)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
