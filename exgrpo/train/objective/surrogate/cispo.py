"""Clipped importance weights, with a gradient for all tokens (CISPO of MiniMax-M1, arXiv 2506.13585)."""

from exgrpo.train.functions import needs
from exgrpo.train.objective.ratios import Objective, RatioTokens, SurrogateOptions


@needs(bounds_weights=True)
def surrogate(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """clip(w) A log pi of each token, clip(w) being constant."""
    ratio = tokens.ratio.detach()
    weight = ratio if options.bounds is None else ratio.clamp(*options.bounds)
    return Objective(weight * tokens.advantage * tokens.log_prob, ratio, weight != ratio)
