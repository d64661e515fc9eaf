"""The page about runs, drawn from what they have written."""
