"""What the length of an answer takes from its reward (soft overlong punishment, DAPO, arXiv 2503.14476)."""

from exgrpo.train.objective.settings import ObjectiveConfig


def overlong_penalty(length: int, longest: int, options: ObjectiveConfig) -> float:
    """Grows evenly from 0 to `overlong_penalty` over the last `overlong_tokens` tokens of the longest answer."""
    if options.overlong_tokens == 0:
        return 0.0
    over = length - (longest - options.overlong_tokens)
    return options.overlong_penalty * min(max(over / options.overlong_tokens, 0.0), 1.0)
