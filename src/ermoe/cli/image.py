"""``ermoe image``: the commands of image classification, and the study that compares its presets."""

from __future__ import annotations

import tyro

from ermoe.images.commands import COMMANDS
from ermoe.studies.image_command import Comparison


def run(argv: list[str]) -> None:
    """Entry point of the command."""
    command = tyro.extras.subcommand_cli_from_dict(
        {**COMMANDS, "study": Comparison},
        prog="ermoe image",
        description="Train, evaluate, probe and use image classifiers.",
        args=argv,
    )
    from rich.console import Console

    command(Console())
