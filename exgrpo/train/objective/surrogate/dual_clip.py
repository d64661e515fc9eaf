"""The clipped surrogate with a lower bound for failures (arXiv 1912.09729)."""

import torch

from exgrpo.train.objective.ratios import Objective, RatioTokens, SurrogateOptions, clip


def surrogate(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """max(min(w A, clip(w) A), c A) where A < 0, else min(w A, clip(w) A)."""
    ratio, advantage = tokens.ratio, tokens.advantage
    value, clipped = clip(ratio, advantage, options)
    bound = options.dual_clip * advantage
    beyond = (advantage < 0) & (value < bound)
    return Objective(torch.where(beyond, bound, value), ratio, clipped | beyond)
