"""Studies: what arms, tasks and seeds say about a question, run by `python -m studies.run` and told by its report."""
