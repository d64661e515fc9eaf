"""Tasks with generated questions: each is a module with a function `generate`."""
