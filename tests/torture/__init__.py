"""Kills of runs and damages of their files, as many as the time allows: `python -m tests.torture` (docs/faults.md)."""
