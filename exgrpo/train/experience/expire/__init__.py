"""What is forgotten: `expire(units, setting) -> Expired`, one function in each file.

`units` are all stored trajectories, `units.now` the step that is planned next, and `units.solved` the questions that
all answers of the latest step solve.
"""
