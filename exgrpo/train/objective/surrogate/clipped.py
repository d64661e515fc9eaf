"""The clipped surrogate of PPO (arXiv 1707.06347), which GRPO and ExGRPO use for fresh tokens."""

from exgrpo.train.functions import needs
from exgrpo.train.objective.ratios import Objective, RatioTokens, SurrogateOptions, clip


@needs(fused=True)
def surrogate(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """min(w A, clip(w) A) of each token."""
    ratio = tokens.ratio
    value, clipped = clip(ratio, tokens.advantage, options)
    return Objective(value, ratio, clipped)
