"""The ``ermoe`` command: finds the command, runs it, and turns what went wrong into one sentence.

Nothing here imports torch, so that help appears at once. A command is a dataclass of its options, or a mapping of such
dataclasses; options are read with tyro before anything heavy is imported.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module

from ermoe import console, cpu
from ermoe._version import __version__
from ermoe.cli.spelling import refuse_old_spelling
from ermoe.console import Command, Terminal, parse_command, run_command
from ermoe.errors import UserError, harmless, unknown_name

COMMANDS: dict[str, tuple[str, str]] = {
    "demo": (
        "studies.demo:Demo",
        "start here: a ViT learns digits, becomes sparse, then faster, and shows its routes",
    ),
    "image": (
        "studies.image_command:COMMANDS",
        "train, evaluate, probe and use image classifiers; check image data sets",
    ),
    "upcycle": ("images.conversion:Upcycle", "make a dense ViT sparse: exactly, or with experts for groups of tokens"),
    "slim": ("images.conversion:Slim", "make a dense ViT sparse and faster, within a budget of operations"),
    "brain": ("brain.commands:COMMANDS", "brain age from T1 scans: check, train, report, predict; research use only"),
    "inspect": ("explorer.commands:Inspect", "see how the experts of one or more models are used, in one HTML file"),
    "explore": ("explorer.commands:Explore", "play with models in the browser: photographs, experts, thresholds"),
    "retrieve": (
        "retrieval.commands:COMMANDS",
        "find images by words and captions by images: train, evaluate, index, search",
    ),
    "info": ("cli.info:Info", "what a model costs, part by part, beside what the paper prints"),
    "export": ("cli.export:Export", "a saved model as an ONNX file or a torch archive that runs without ermoe"),
    "push": ("cli.push:Push", "put a saved model on the Hugging Face hub, with a card that says what it is"),
    "paper": (
        "studies.paper_command:COMMANDS",
        "every table and figure of the paper as one command, its figures beside ours",
    ),
    "bench": (
        "studies.bench_command:Bench",
        "time the layer and whole models beside their peers, as ratios in one run",
    ),
}
"""Name → (module:attribute within ermoe, what it does in one line)."""

_EXTRAS = dict.fromkeys(("nibabel", "nilearn", "monai", "einops", "pandas"), "brain")
"""Packages that not every installation has, and the extra that brings them."""
INTERRUPTED = 130
UNREAD = 141
MISTAKEN = 2


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code: 0, 2 for a mistake a person can mend, 130 after Ctrl-C.

    Whoever reads the output may stop reading, as `head` does: 141, as other programs have it.
    """
    argv = sys.argv[1:] if argv is None else argv
    try:
        return run(argv)
    except UserError as mistake:
        print(f"ermoe: {mistake}", file=sys.stderr)
        return MISTAKEN
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains at its end
        return UNREAD
    except OSError as problem:
        if problem.filename is None:  # nothing a person could look at
            raise
        print(f"ermoe: {harmless(str(problem.filename)[:200])}: {problem.strerror}; look at the path", file=sys.stderr)
        return MISTAKEN
    except KeyboardInterrupt:
        print("\nermoe: interrupted", file=sys.stderr)
        return INTERRUPTED


def run(argv: list[str]) -> int:
    """The same, but mistakes are raised."""
    if not argv or argv[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    name, *rest = argv
    if name in ("-V", "--version", "version"):
        print(f"ermoe {__version__}")
        return 0
    refuse_old_spelling(argv)
    if name not in COMMANDS:
        raise unknown_name("command", name, COMMANDS)
    if not {"-h", "--help"} & set(rest):
        _limit_cpu()
        cpu.keep_freed()
    try:
        command = command_named(name)
        if isinstance(command, Mapping):
            purpose = COMMANDS[name][1]
            run_command(command, rest, prog=f"ermoe {name}", description=purpose[0].upper() + purpose[1:] + ".")
        else:
            parse_command(command, rest, prog=f"ermoe {name}")(Terminal())
    except ModuleNotFoundError as missing:
        if missing.name not in _EXTRAS:
            raise
        raise UserError(f'{missing.name} is missing: pip install "ermoe[{_EXTRAS[missing.name]}]"') from missing
    return 0


def command_named(name: str) -> type[Command] | Mapping[str, type[Command]]:
    """The dataclass of a command's options, or those of the commands below it."""
    module, attribute = COMMANDS[name][0].split(":")
    found: type[Command] | Mapping[str, type[Command]] = getattr(import_module(f"ermoe.{module}"), attribute)
    return found


def every_command() -> Iterator[tuple[str, type[Command]]]:
    """Every command with its options, by what is typed to run it."""
    for name in COMMANDS:
        command = command_named(name)
        if isinstance(command, Mapping):
            yield from ((f"{name} {below}", kind) for below, kind in command.items())
        else:
            yield name, command


def _limit_cpu() -> None:
    """While torch is not there yet; of the processes that torchrun or srun started on a machine, one says so."""
    sentence = cpu.limit()
    if sentence and os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")) == "0":
        print(f"ermoe: {sentence}", file=sys.stderr)


def usage() -> str:
    """What ``ermoe`` alone prints."""
    return console.usage(
        "ermoe",
        "Mixtures of experts that route by their own eigenbasis, without a gate or a balancing loss.",
        {name: purpose for name, (_, purpose) in COMMANDS.items()},
        ending="\n  ermoe --version        the version\n\n"
        "In Python: model = ermoe.upcycle(dense_model) makes a ViT sparse; ermoe.record_routing(model) shows how it "
        "routes.",
    )
