"""How long one waits for the explorer: for the first coloured photograph, and for a change of T or k to be seen.

    python benchmarks/explorer_times.py deit IMAGES --rounds 3

``deit`` is what ``ermoe upcycle … --init clusters`` wrote (docs/results/deit-experts.md). Each round starts ``ermoe
explore``; a headless Chromium is open already and goes to the address that the command says. The first photograph
counts from the start of the command until it is on the page in colours, without the seconds that a process needs to
import torch, which are measured in the same round. Then T and k are moved, one step after the other, and the page says
how long each took until the new picture was seen. Adds a line to benchmarks/results/bench.jsonl.
"""

from __future__ import annotations

import argparse
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from ermoe.studies.bench.result import Bar, Result, save, show
from support.browser import Browser

READY = "window.explorer && explorer.panels().length && explorer.panels().every(p => p.seen && !p.asking)"
MOVED = "performance.getEntriesByName('redraw').length === {}"


def seconds(work: Callable[[], object]) -> float:
    """That it takes."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def imported() -> float:
    """Seconds of a process that does nothing but import torch, less those of one that does nothing."""
    torch, nothing = (
        seconds(lambda c=code: subprocess.run([sys.executable, "-c", c])) for code in ("import torch", "")
    )
    return torch - nothing


def one_round(model: str, data: str, changes: int) -> dict[str, float]:
    """A start of the command, and so many changes of T and of k."""
    loading = imported()
    with Browser(1200) as browser:
        start = time.perf_counter()
        words = [sys.executable, "-m", "ermoe", "explore", model, "--data", data, "--port", "0", "--no-browser"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            lines = iter(process.stdout.readline, "")
            address = next(found[0] for line in lines if (found := re.search(r"http://\S+", line)))
            answered = time.perf_counter() - start
            browser.open(address)
            browser.wait_until("performance.getEntriesByName('first picture').length > 0")
            first = time.perf_counter() - start
            redraw = {name: moved(browser, name, changes) for name in ("threshold", "experts")}
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(30)
    return {"loading": loading, "answered": answered, "first": first, **redraw}


def moved(browser: Browser, name: str, changes: int) -> float:
    """The median of the page's own figures, in seconds, over so many values of T, or over all of k."""
    browser.wait_until(READY)
    browser.evaluate("performance.clearMeasures('redraw')")
    most = int(browser.evaluate("document.querySelector('.experts input').max"))
    places = {"threshold": [n / (changes + 1) for n in range(1, changes + 1)], "experts": range(1, most + 1)}
    for number, value in enumerate(places[name], 1):  # each once: what was asked a moment ago is remembered
        move = (
            f"const s = document.querySelector('.{name} input'); s.value = {value}; s.dispatchEvent(new Event('input'))"
        )
        browser.evaluate(f"{{ {move} }}")
        browser.wait_until(f"{READY} && {MOVED.format(number)}")
    found = browser.evaluate("performance.getEntriesByName('redraw').map(entry => entry.duration)")
    return statistics.median(found) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("data")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--changes", type=int, default=20, help="of T")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    rounds = [one_round(options.model, options.data, options.changes) for _ in range(options.rounds)]
    figures = {name: statistics.median(own[name] for own in rounds) for name in rounds[0]}
    result = Result("explorer_times", {"rounds": options.rounds, "changes": options.changes}, reference="")
    result.figures |= {
        "seconds to import torch": figures["loading"],
        "seconds until the address is shown": figures["answered"],
        "seconds until the first photograph": figures["first"],
    }
    first = statistics.median(own["first"] - own["loading"] for own in rounds)
    result.bars = [
        Bar("seconds until the first photograph, after torch is loaded", first, 10.0),
        Bar("seconds until a change of T is seen", figures["threshold"], 0.3),
        Bar("seconds until a change of k is seen", figures["experts"], 0.3),
    ]
    console = Console()
    show(result, console)
    console.print(f"written: {save(result, options.out)}")


if __name__ == "__main__":
    main()
