"""Table 4: retrieval on Flickr30k with an ERMoE image tower and a frozen text tower."""

from __future__ import annotations

from ermoe.studies.paper.captions import study_of

QUOTED = {
    "Long-CLIP": ("53.4", "77.5", "85.3", "41.2", "64.1", "72.6"),
    "Fix-CLIP": ("60.5", "89.0", "89.8", "49.6", "66.9", "77.4"),
    "CLIP-MoE": ("60.5", "82.3", "88.8", "42.1", "64.7", "73.2"),
    "CLIP-ERMoE": ("63.4", "89.3", "89.8", "42.4", "64.9", "74.0"),
}

STUDY = study_of(
    "flickr",
    "image–text retrieval on Flickr30k",
    "Flickr30k (1,000 or all 31,783 images, it does not say), an ImageNet image tower, CLIP's text tower frozen.",
    "flickr30k-karpathy-1k",
    QUOTED,
)
