"""Answers of several turns: what an environment says between what the policy writes."""
