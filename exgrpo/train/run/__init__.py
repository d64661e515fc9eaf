"""A run: checks at the start, building, the loop around the steps, validation, and what it writes."""
