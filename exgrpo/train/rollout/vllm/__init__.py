"""vLLM as a guest in the trainer's process."""
