"""The checks, one part of a run each; see `exgrpo.train.doctor.check`."""
