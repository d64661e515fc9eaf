"""Studies: comparisons of arms over tasks and seeds, run by `python -m studies.run` and summarized by its report."""
