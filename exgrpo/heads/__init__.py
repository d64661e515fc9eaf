"""The output head of a causal LM: its parameters, what the model does with its logits, and computing inside it."""
