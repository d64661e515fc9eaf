"""Rollouts by models of transformers in the process: engine, decoding, draws, cache and attention."""
