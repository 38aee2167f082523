"""What a command line changes about a preset's training."""

from __future__ import annotations

from dataclasses import fields
from typing import Any


def training_changes(options: Any) -> dict[str, Any]:
    """The fields of `ermoe.train.settings.Training` that ``options`` has under the same name and was given."""
    from ermoe.train.settings import Training

    given = {field.name: getattr(options, field.name, None) for field in fields(Training)}
    return {name: value for name, value in given.items() if value is not None}
