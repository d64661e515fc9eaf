"""How the ratios of tokens enter the loss: functions `(tokens, options) -> Objective`. See `objective.ratios`."""

import torch

from exgrpo.kernels.objective import bounded_ratio
from exgrpo.train.common.functions import needs
from exgrpo.train.policy.ratios import Objective, RatioTokens, SurrogateOptions, clip


@needs(fused=True)
def clipped(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """min(w A, clip(w) A) of each token: PPO (arXiv 1707.06347), as GRPO and ExGRPO use it for fresh tokens."""
    ratio = tokens.ratio
    value, clipped = clip(ratio, tokens.advantage, options)
    return Objective(value, ratio, clipped)


def dual_clip(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """max(min(w A, clip(w) A), c A) where A < 0, else min(w A, clip(w) A) (arXiv 1912.09729)."""
    ratio, advantage = tokens.ratio, tokens.advantage
    value, clipped = clip(ratio, advantage, options)
    bound = options.dual_clip * advantage
    beyond = (advantage < 0) & (value < bound)
    return Objective(torch.where(beyond, bound, value), ratio, clipped | beyond)


@needs(bounds_weights=True)
def cispo(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """clip(w) A log pi of each token, clip(w) being constant: all tokens have a gradient (arXiv 2506.13585)."""
    ratio = tokens.ratio.detach()
    weight = ratio if options.bounds is None else ratio.clamp(*options.bounds)
    return Objective(weight * tokens.advantage * tokens.log_prob, ratio, weight != ratio)


def gspo(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """min(s A, clip(s) A) for each token of an answer, s being the geometric mean of its tokens' ratios.

    GSPO, arXiv 2507.18071. All tokens of an answer have the same ratio, and so one sum of advantages stands for them.
    """
    ratio = bounded_ratio(tokens.sums(tokens.log_ratio) / tokens.lengths)
    value, clipped = clip(ratio, tokens.sums(tokens.advantage), options)
    of_tokens = (each.repeat_interleave(tokens.lengths, output_size=len(tokens.log_prob)) for each in (ratio, clipped))
    return Objective(value, *of_tokens)
