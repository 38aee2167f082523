"""``ermoe image``: the commands of image classification, and the study that compares its presets."""

from __future__ import annotations

from ermoe.console import run_command
from ermoe.images.commands import COMMANDS
from ermoe.studies.image_command import Comparison


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    description = "Train, evaluate, probe and use image classifiers."
    run_command({**COMMANDS, "study": Comparison}, argv, prog="ermoe image", description=description)
