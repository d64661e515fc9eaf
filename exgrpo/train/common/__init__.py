"""Shared foundations: errors, records, success rule, processes, seeds and functions by name."""
