"""The ends of the ranges in pyproject.toml, each tried in an environment of its own."""
