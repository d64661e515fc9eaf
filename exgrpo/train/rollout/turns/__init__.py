"""Answers of several turns: the policy and an environment write alternately."""
