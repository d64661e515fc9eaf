"""Checkpoints, and resuming a run exactly."""
