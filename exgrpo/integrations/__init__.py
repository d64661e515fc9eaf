"""Drop-ins for other codebases, each a thin module on :mod:`exgrpo.kernels`, imported on demand."""
