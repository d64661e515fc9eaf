"""The clipped surrogate of whole answers (GSPO, arXiv 2507.18071)."""

from exgrpo.kernels.objective import bounded_ratio
from exgrpo.train.objective.ratios import Objective, RatioTokens, SurrogateOptions, clip


def surrogate(tokens: RatioTokens, options: SurrogateOptions) -> Objective:
    """min(s A, clip(s) A) for each token of an answer, s being the geometric mean of its tokens' ratios.

    All tokens of an answer have the same ratio, and so one sum of advantages stands for them.
    """
    ratio = bounded_ratio(tokens.sums(tokens.log_ratio) / tokens.lengths)
    value, clipped = clip(ratio, tokens.sums(tokens.advantage), options)
    of_tokens = (each.repeat_interleave(tokens.lengths, output_size=len(tokens.log_prob)) for each in (ratio, clipped))
    return Objective(value, *of_tokens)
