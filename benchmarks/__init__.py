"""What the kernels and the experience module are worth on this machine; docs/benchmarks.md describes the methods."""
