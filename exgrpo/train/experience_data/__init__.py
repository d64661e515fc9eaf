"""Experience as data: what a run has stored is shown, exported as a data set, and is what another run begins with.

`python -m exgrpo.train.experience show RUN` and `export RUN FOLDER` are in `program`; `start` is the way back, the
option `experience.start`. `Experience` is what a run's checkpoint and a file of traces have in common.
"""
