"""`vllm serve` instances as a rollout engine."""
