"""What is wrong with a scan or a table, as sentences that name the person and the file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ermoe.errors import UserError

Severity = Literal["error", "warning"]


@dataclass(frozen=True, slots=True)
class Problem:
    """One finding. An error stops a training run before it starts; a warning is counted and shown.

    >>> print(Problem("error", "sub-01", Path("a.nii.gz"), "holds NaN", remedy="replace it by 0"))
    sub-01: a.nii.gz holds NaN: replace it by 0
    """

    severity: Severity
    subject: str | None
    """Key of the scan or id of the participant; None when it is about a whole table."""
    path: Path | None
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        subject = f"{self.subject}: " if self.subject else ""
        place = f"{self.path} " if self.path else ""
        remedy = f": {self.remedy}" if self.remedy else ""
        return f"{subject}{place}{self.what}{remedy}"


class ScanError(UserError):
    """One scan cannot be used. `predict` makes a row of it, training stops."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(str(problem))
        self.problem = problem


def stop_at_errors(problems: Sequence[Problem], *, shown: int = 20) -> None:
    """Raises `UserError` with every error among ``problems``, one a line; warnings pass."""
    errors = [problem for problem in problems if problem.severity == "error"]
    if not errors:
        return
    rest = [f"… and {len(errors) - shown} more"] if len(errors) > shown else []
    listed = "\n".join(f"  {line}" for line in [*map(str, errors[:shown]), *rest])
    raise UserError(f"{len(errors)} error{'s' if len(errors) > 1 else ''} in the data, to be mended first:\n{listed}")
