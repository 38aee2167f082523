"""Run every example in this folder, one on each core, and fail if one of them does.

    python examples/run_all.py [NAME ...]

Each runs in a temporary folder of its own, so that an example cannot lean on files of the checkout or on what
another one left behind.
"""

import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FOLDER = Path(__file__).resolve().parent
TIMEOUT_SECONDS = 300


def run(example: Path) -> tuple[str | None, float]:
    """Run one example; None if it went well, otherwise what it said, and why it failed; and the seconds it took."""
    env = {**os.environ, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1"}
    start = time.perf_counter()
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
    return None if code == 0 else f"{output.rstrip()}\n{reason}".lstrip(), time.perf_counter() - start


def main(names: list[str]) -> int:
    examples = sorted(path for path in FOLDER.glob("*.py") if path != Path(__file__).resolve())
    if unknown := set(names) - {path.stem for path in examples}:
        print(f"no such example: {', '.join(sorted(unknown))} (there are: {', '.join(p.stem for p in examples)})")
        return 2
    chosen = [path for path in examples if not names or path.stem in names]
    failures = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for example, (complaint, seconds) in zip(chosen, pool.map(run, chosen), strict=True):
            verdict = "ok" if complaint is None else "FAILED"
            print(f"{example.name:40} {verdict:6} {seconds:6.1f} s", flush=True)
            if complaint is not None:
                failures += 1
                print(complaint, flush=True)
    print(f"examples: {failures} of {len(chosen)} failed")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
