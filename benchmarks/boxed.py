r"""A reward that costs next to nothing: does the gold answer stand in a \boxed{}?"""


def score(response: str, gold: str) -> float:
    """1 if it does."""
    return float(f"\\boxed{{{gold}}}" in response)
