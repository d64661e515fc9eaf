"""Generation and grading: the rollout engines with their common interface, and environments that reply."""
