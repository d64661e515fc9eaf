"""Which answers of a graded group are stored: `admit(group, setting) -> trajectories`, one function in each file.

Of equal answers to a question the memory keeps the newest. `needs(one_per_key=True)`: those with the same solution key
count as equal, too.
"""
