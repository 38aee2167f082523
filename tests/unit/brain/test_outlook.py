"""What those hear who wait for a run."""

import io

from rich.console import Console

from ermoe.brain.data.splits import k_folds
from ermoe.brain.evaluation import confounds_among
from ermoe.brain.outlook import Outlook
from ermoe.train.compute import Compute
from support.tiny_brains import person


def test_the_end_is_told_once_a_fold_is_over():
    heard, now = Console(file=io.StringIO(), width=200), iter([0.0, 600.0, 600.0, 600.0])
    outlook = Outlook(Compute(console=heard), num_folds=3, num_phases=2, clock=lambda: next(now))
    outlook.fold(0, "fold-0", 8, 4)
    outlook.learnt()
    outlook.fold(1, "fold-1", 8, 4)
    first, second = heard.file.getvalue().splitlines()
    assert first.endswith(
        "fold 1 of 3 (fold-0): learns from 8 people, is tested on 4 others; after it, the time of the end is told"
    )
    assert "about 20 minutes left, until about" in second


def test_labels_that_tell_age_are_named_before_anything_was_learnt():
    old = [person(n, age=70.0 + n % 5, sex="MF"[n % 2], batch="old") for n in range(10)]
    young = [person(n, age=30.0 + n % 5, sex="MF"[n % 2], batch="young") for n in range(10, 20)]
    (said,) = confounds_among([*old, *young], k_folds([*old, *young], 5, 0))
    assert said.startswith("batch alone predicts age with an error of 1")
    assert confounds_among(old, k_folds(old, 5, 0)) == []
