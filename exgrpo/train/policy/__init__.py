"""The trained model under ZeRO-3, and what it learns from."""
