"""Tasks whose questions are generated: each is a module with a function `generate`."""
