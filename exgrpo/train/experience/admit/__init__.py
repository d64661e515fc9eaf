"""Which answers of a graded group are stored: `admit(group, setting) -> trajectories`, one function in each file.

Of equal answers to a question the memory keeps the newest if the function says `needs(distinct="response")`, with
"key" also of those with the same solution key. Otherwise it keeps all, so that a group stays as it was.
"""
