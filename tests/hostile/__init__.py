"""Hostile input by generation, any number of cases: `pytest tests/hostile --cases` (docs/hostile_input.md)."""
