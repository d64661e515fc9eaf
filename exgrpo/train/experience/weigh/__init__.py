"""How replayed tokens enter the loss: `weigh(answers, options) -> terms`, one function in each file.

See `exgrpo.train.experience.weighing`.
"""
