"""What a run tells those who wait for it: which fold of how many, which phase, and when it will end."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ermoe.train.compute import Compute


@dataclass(slots=True)
class Outlook:
    """Speaks while folds are learnt.

    Args:
        compute: whose console is spoken to.
        num_folds: of the run.
        num_phases: of a fold.
        clock: seconds, by which folds are timed.
    """

    compute: Compute
    num_folds: int
    num_phases: int
    clock: Callable[[], float] = time.time
    _began: float = field(default=0.0, init=False)
    _seconds: list[float] = field(default_factory=list, init=False)

    def fold(self, number: int, name: str, num_teachers: int, num_tested: int) -> None:
        """A fold begins; ``number`` counts from 0."""
        self._began = self.clock()
        self.compute.say(
            f"fold {number + 1} of {self.num_folds} ({name}): learns from {num_teachers} people, is tested on "
            f"{num_tested} others{self._end(self.num_folds - number)}"
        )

    def phase(self, number: int, what: str) -> None:
        """A phase of the fold begins; ``number`` counts from 1."""
        self.compute.say(f"  phase {number} of {self.num_phases}: {what}")

    def learnt(self) -> None:
        """The fold is over, and took as long as others may."""
        self._seconds.append(self.clock() - self._began)

    def _end(self, folds_left: int) -> str:
        """When all will be over, as far as the folds so far tell."""
        if not self._seconds:
            return "" if self.num_folds == 1 else "; after it, the time of the end is told"
        left = folds_left * sum(self._seconds) / len(self._seconds)
        at = time.strftime("%H:%M", time.localtime(self.clock() + left))
        return f"; {_duration(left)} left, until about {at}"


def _duration(seconds: float) -> str:
    """
    >>> _duration(40), _duration(100), _duration(9000)
    ('under a minute', 'about 2 minutes', 'about 2.5 hours')
    """
    if seconds < 60:
        return "under a minute"
    return f"about {math.ceil(seconds / 60)} minutes" if seconds < 5400 else f"about {seconds / 3600:.1f} hours"
