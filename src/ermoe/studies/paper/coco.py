"""Table 3: retrieval on COCO with an ERMoE image tower and a frozen text tower."""

from __future__ import annotations

from ermoe.studies.paper.captions import study_of

QUOTED = {
    "Long-CLIP": ("62.8", "85.1", "91.2", "46.3", "70.8", "79.8"),
    "Fix-CLIP": ("62.3", "85.4", "91.4", "49.1", "73.8", "82.4"),
    "CLIP-MoE": ("65.0", "86.0", "92.0", "46.8", "71.7", "80.4"),
    "CLIP-ERMoE": ("65.4", "88.3", "94.7", "46.5", "72.9", "81.6"),
}

STUDY = study_of(
    "coco",
    "image–text retrieval on COCO",
    "COCO, 5,000 test images (it does not say which), an ImageNet image tower, CLIP's text tower frozen.",
    "coco-karpathy-5k",
    QUOTED,
)
