"""The trained model, under ZeRO-3 or whole in one process, and what it learns from."""
