"""A two-branch variant in the style of Fix-CLIP (Wang et al. 2025), whose code was never released.

Long texts are matched with whole images, short texts with images of which a share of the patches is left out. Their
regional prompt tokens, their alignment of intermediate layers and their 30 M recaptioned images are not part of it, and
their mask ratio is not known: figures of this variant are not Fix-CLIP's.

Letters: B pairs, D width.
"""

from __future__ import annotations

from torch import Tensor

MASKED_SHARE = 0.5


def pairs(image_2BD: Tensor, text_2BD: Tensor) -> list[tuple[Tensor, Tensor]]:
    """What is matched with what: whole images with long texts, masked images with short ones."""
    (whole_BD, masked_BD), (long_BD, short_BD) = image_2BD.chunk(2), text_2BD.chunk(2)
    return [(whole_BD, long_BD), (masked_BD, short_BD)]
