"""A model on held-out questions."""
