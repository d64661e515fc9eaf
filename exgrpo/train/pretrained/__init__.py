"""Where a model comes from, and whether it is whole and fits."""
