"""Run every example in this folder, one after the other, and fail if one of them does.

    python examples/run_all.py [NAME ...]

Each runs in a temporary folder of its own, so that an example cannot lean on files of the checkout or on what
another one left behind.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 300


def run(example: Path) -> str | None:
    """Run one example; None if it went well, otherwise what it said, and why it failed."""
    env = {**os.environ, "MPLBACKEND": "Agg"}
    with tempfile.TemporaryDirectory() as folder, open(Path(folder, "output.log"), "w+b") as log:
        try:
            code = subprocess.run(
                [sys.executable, str(example)],
                cwd=folder,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=TIMEOUT_SECONDS,
            ).returncode
            reason = f"exit code {code}"
        except subprocess.TimeoutExpired:
            code, reason = -1, f"stopped after {TIMEOUT_SECONDS} s"
        log.seek(0)
        output = log.read().decode(errors="replace")
    return None if code == 0 else f"{output.rstrip()}\n{reason}".lstrip()


def main(names: list[str]) -> int:
    examples = sorted(path for path in FOLDER.glob("*.py") if path != Path(__file__).resolve())
    if unknown := set(names) - {path.stem for path in examples}:
        print(f"no such example: {', '.join(sorted(unknown))} (there are: {', '.join(p.stem for p in examples)})")
        return 2
    failures = 0
    for example in examples:
        if names and example.stem not in names:
            continue
        start = time.perf_counter()
        complaint = run(example)
        verdict = "ok" if complaint is None else "FAILED"
        print(f"{example.name:40} {verdict:6} {time.perf_counter() - start:6.1f} s", flush=True)
        if complaint is not None:
            failures += 1
            print(complaint, flush=True)
    print(f"examples: {failures} of {len(names or examples)} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
