"""One day on a GPU: its parts in the order of what they are worth, and what came of them."""
