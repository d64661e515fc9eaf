"""The reward of the run that lies here."""


def even(response, gold):
    """1 for an even number of characters, which random answers have about half of the time; else 0."""
    return float(len(response) % 2 == 0)
