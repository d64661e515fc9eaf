"""vLLM inside the trainer's process."""
