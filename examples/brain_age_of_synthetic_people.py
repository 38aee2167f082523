"""Brain age from start to end in Python: a synthetic cohort, three folds, a report, and a prediction.

The brains are phantoms and the model is tiny: it shows the steps, and its figures mean nothing.
"""

import sys
from pathlib import Path

try:
    import monai  # noqa: F401
    import nibabel  # noqa: F401
    import nilearn  # noqa: F401
except ImportError as missing:
    print(f'{missing.name} is not installed (pip install "ermoe[brain]"): nothing to show')
    sys.exit(0)

import ermoe
from ermoe.brain.data.phantom import synthesize

bids = synthesize("bids", subjects=12, spacing_mm=6.0)

# One network a fold; nobody is judged by a network that has learnt from them. An interrupted call goes on.
figures = ermoe.brain.train("tiny-ermoe", bids, "run", folds=3, cache="cache")
print("held-out people, raw:", figures)

# Tables, figures, model card and one HTML page, as a BIDS derivative.
page = ermoe.brain.report("run", cache=Path("cache"), occlusion_scans=1)
print("report:", page)

# A new scan. This one is known, so only the fold that had not seen the person answers, and says so.
(row,) = ermoe.brain.predict("run", bids / "sub-0001" / "anat" / "sub-0001_T1w.nii.gz", cache="cache")
print(f"{row.participant_id}: {row.brain_age:.1f} years [{row.brain_age_low:.1f}, {row.brain_age_high:.1f}]")
assert row.seen_in_training
