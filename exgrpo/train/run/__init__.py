"""A run: startup checks, building, the loop around the steps, validation, and its output."""
