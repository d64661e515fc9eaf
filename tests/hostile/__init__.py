"""Hostile input by generation, as many seeded cases as one likes: `python -m tests.hostile` (docs/hostile_input.md)."""
