"""What the GPU paths of the fused head should take, by counting: docs/gpu_model.md."""
