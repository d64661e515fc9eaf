"""Surrogates: functions `(tokens, options) -> Objective` of the ratios of tokens (`ratios` has their types).

The first ones multiply advantages by ratios or by log-probs. The regressions pull beta2 S towards A, with S the
log-ratio of an answer to the policy that wrote it, and A its advantage. Their gradient is proportional to
A - beta2 S, so old answers need no ratio, and groups that are all right or all wrong hold the policy where it is.
"""

import torch

from exgrpo.kernels.objective import bounded_ratio
from exgrpo.train.common.functions import needs
from exgrpo.train.config.objective import MethodOptions
from exgrpo.train.policy.ratios import Objective, RatioTokens, clip


@needs(fused=True)
def clipped(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """min(w A, clip(w) A) of each token: PPO (arXiv 1707.06347), as GRPO and ExGRPO use it for fresh tokens."""
    ratio = tokens.ratio
    value, clipped = clip(ratio, tokens.advantage, tokens.bounds)
    return Objective(value, ratio, clipped)


def dual_clip(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """max(min(w A, clip(w) A), c A) where A < 0, else min(w A, clip(w) A) (arXiv 1912.09729)."""
    ratio, advantage = tokens.ratio, tokens.advantage
    value, clipped = clip(ratio, advantage, tokens.bounds)
    bound = options.objective.dual_clip * advantage
    beyond = (advantage < 0) & (value < bound)
    return Objective(torch.where(beyond, bound, value), ratio, clipped | beyond)


@needs(bounds_weights=True)
def cispo(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """clip(w) A log pi of each token, clip(w) being constant: all tokens have a gradient (arXiv 2506.13585)."""
    ratio = tokens.ratio.detach()
    weight = ratio if tokens.bounds is None else ratio.clamp(*tokens.bounds)
    return Objective(weight * tokens.advantage * tokens.log_prob, ratio, weight != ratio)


def gspo(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """min(s A, clip(s) A) for each token of an answer, s being the geometric mean of its tokens' ratios.

    GSPO, arXiv 2507.18071. All tokens of an answer have the same ratio, and so one sum of advantages stands for them.
    """
    ratio = bounded_ratio(tokens.means(tokens.log_ratio))
    value, clipped = clip(ratio, tokens.sums(tokens.advantage), tokens.bounds)
    return Objective(value, tokens.over_tokens(ratio), tokens.over_tokens(clipped))


@needs(bounds_weights=True)
def topr(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """a A log pi of each token: a = 1 where A >= 0, else min(w, 1) of the whole answer, constant.

    TOPR, arXiv 2503.14286: successes are imitated, and failures that the policy has left push it no further.
    """
    ratio = tokens.ratio.detach()
    of_answer = tokens.over_tokens(tokens.sums(tokens.log_ratio.detach()))
    failure = tokens.advantage < 0
    weight = torch.where(failure, of_answer.clamp(max=0).exp(), 1)
    return Objective(weight * tokens.advantage * tokens.log_prob, ratio, failure & (of_answer > 0))


@needs(all_rows=True)
def oapl(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """-(beta2 S - A)^2 of each answer: OAPL (arXiv 2602.19362), with `baseline: log_mean_exp`. A*-PO has the same."""
    return _regression(tokens, options, 1.0)


@needs(all_rows=True, coupled=True)
def coupled(tokens: RatioTokens, options: MethodOptions) -> Objective:
    """-(u - mean u)^2 of each answer, u = reward / beta2 - S, with the mean over its group.

    TBA (arXiv 2503.18929), whose log Z is that mean; AGRO (arXiv 2503.19612) is beta2^2 times it, and REBEL over all
    pairs of K answers (arXiv 2404.16767) 2 K / (K - 1) times AGRO.
    """
    return _regression(tokens, options, 1 / options.objective.beta2**2)


def _regression(tokens: RatioTokens, options: MethodOptions, scale: float) -> Objective:
    """-scale (A - beta2 S)^2 of each answer."""
    rest = tokens.means(tokens.advantage) - options.objective.beta2 * tokens.sums(tokens.log_ratio)
    ratio = tokens.ratio.detach()
    value = -scale * tokens.means(tokens.weight) * rest.square()
    return Objective(value, ratio, torch.zeros_like(ratio, dtype=torch.bool))
