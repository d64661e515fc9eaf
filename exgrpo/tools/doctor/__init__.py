"""What a run needs of this machine, part by part: `python -m exgrpo.tools.doctor`."""
