"""The program `exgrpo evaluate`: scores of a model on held-out questions."""
