"""What the kernels and the experience module are worth on this machine; README.md describes the methods."""
