"""Metrics of a step, and the files, terminal and trackers that get them."""
