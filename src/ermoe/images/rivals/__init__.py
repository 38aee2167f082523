"""Image-level rivals of the paper, in their own form: whole images choose, not tokens."""

from ermoe.images.rivals.deep_moe import DeepMoEStyle
from ermoe.images.rivals.single_gated import SingleGatedMoEStyle

__all__ = ["DeepMoEStyle", "SingleGatedMoEStyle"]
