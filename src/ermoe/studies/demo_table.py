"""The table of the demo: what its models reached, and what they cost beside the dense one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ermoe.analysis.summary import MEASURES
from ermoe.data.images import open_images
from ermoe.models.count import count
from ermoe.models.io import weightless
from ermoe.studies.bench.measure import Measurement
from ermoe.studies.tables import Table
from ermoe.train.run_folder import model_folder


@dataclass(frozen=True, slots=True)
class Row:
    """A model: where it is, what it reached on held-out digits, its size, and its times beside the dense one's."""

    name: str
    place: Path
    accuracy: float
    load_cv2: float
    parameters: int
    operations: int
    agreement: float = math.nan
    step: Measurement | None = None
    answer: Measurement | None = None

    @classmethod
    def of(cls, name: str, folder: Path, figures: Mapping[str, Any], step: Measurement | None = None) -> Row:
        """From the figures of a run, and the model in its folder."""
        size = count(weightless(model_folder(folder)))
        return cls(
            name,
            folder,
            accuracy=figures["top1"],
            load_cv2=figures.get("load_cv2", math.nan),
            parameters=size.total_parameters,
            operations=size.multiply_adds.total,
            agreement=figures.get("agreement", math.nan),
            step=step,
        )


def table(rows: Sequence[Row]) -> Table:
    """A row a model; the first is the dense one, beside which operations and times are counted.

    Answering is a pass over many digits at once.
    """
    titles = ["model", "accuracy", "operations", "parameters", "load CV²", "training step"]
    answers = any(row.answer is not None for row in rows)
    made = [
        [
            row.name,
            f"{row.accuracy:.1%}",
            f"{row.operations / rows[0].operations:.2f} ×",
            f"{row.parameters / 1e3:,.0f} k",
            MEASURES["load_cv2"].text(row.load_cv2),
            _ratio(row.step),
            *([_ratio(row.answer)] if answers else []),
        ]
        for row in rows
    ]
    return Table([*titles, *(["answering"] if answers else [])], made)


def _ratio(time: Measurement | None) -> str:
    return "–" if time is None else f"{time.ratio:.2f} ×"


def noise_note(accuracy: float) -> str:
    """How large a difference in accuracy has to be before it means something."""
    num_test = len(open_images("digits", "test"))
    error = math.sqrt(accuracy * (1 - accuracy) / num_test)
    return (
        f"With {num_test} held-out digits and one seed, accuracies less than about {300 * error:.1f} points apart are "
        "equal. × is beside the dense one."
    )
