"""Image-level rivals of the paper, in their own form: whole images choose, not tokens."""

from ermoe.models.baselines.deep_moe import DeepMoEStyle
from ermoe.models.baselines.single_gated import SingleGatedMoEStyle

__all__ = ["DeepMoEStyle", "SingleGatedMoEStyle"]
