"""How runs and curves are told apart: colours for all kinds of colour vision, symbols and dashes."""

# Okabe and Ito's colours, without yellow, which is lost on white; and theirs in lighter tones for a dark ground.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
DARK_COLOURS = ("#4AA3F0", "#F5803E", "#2FC79A", "#E59BC4", "#A9DCFF", "#F2C14E", "#F5F5F5")
SYMBOLS = ("", "circle", "square", "triangle-up", "diamond", "triangle-down")
KEYS = ("", "●", "■", "▲", "◆", "▼")
DASHES = ("solid", "dash", "dot")
# Of matplotlib's colour map cividis, without its darkest end, which is lost on a dark ground.
GRADES = ("#2b446e", "#575d6d", "#7c7b78", "#a69d75", "#d3c164", "#fee838")


def colour(index: int) -> str:
    """Of the index-th group, as a page's style sheet calls it."""
    return f"var(--curve-{index % len(COLOURS)})"


def symbol(index: int) -> str:
    """Of the index-th group: what tells it from an earlier one of the same colour; empty for the first ones."""
    return SYMBOLS[index // len(COLOURS) % len(SYMBOLS)]


def key(index: int) -> str:
    """The character that a legend shows for the symbol of the index-th group."""
    return KEYS[index // len(COLOURS) % len(KEYS)]


def grade(index: int, count: int) -> str:
    """The index-th of `count` colours whose order is seen, as #rrggbb."""
    place = index / max(1, count - 1) * (len(GRADES) - 1)
    low = min(int(place), len(GRADES) - 2)
    ends = [[int(GRADES[at][i : i + 2], 16) for i in (1, 3, 5)] for at in (low, low + 1)]
    mixed = [round(a + (b - a) * (place - low)) for a, b in zip(*ends, strict=True)]
    return "#" + "".join(f"{part:02x}" for part in mixed)
