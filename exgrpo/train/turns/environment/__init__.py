"""Environments by name: `environment(question, gold) -> reply`, one function in each file.

It begins an answer to a question, and may take columns of the question's row as keyword arguments behind a *, as a
reward does. `reply(turn) -> str | None` gets what the policy has written since the last reply, with the stop string
that ended it and without an EOS token, and says what comes behind it; None: nothing. With no reply the policy goes on
behind a stop string, and the answer is complete behind an EOS token. `needs(stop=(...))` of the function names the
strings at which the policy waits.

Every answer has a `reply` of its own, which may keep what it needs to know; those of several answers are called in
threads beside each other.
"""
