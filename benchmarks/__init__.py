"""Benchmarks of the kernels and of the experience module; docs/benchmarks.md describes the methods."""
