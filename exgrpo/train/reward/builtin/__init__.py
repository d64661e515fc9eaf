"""The rewards that have a name: the module NAME has what belongs to the reward NAME.

reward(response, gold): the reward itself.
form(response, gold), found(response, gold), key(response, gold): the functions beside it, see
    exgrpo.train.reward.names; a reward may have none.
decisive_part(response): the part of a response on which its grade depends, None where every grade is 0; without it the
    whole response counts. Answers whose parts are equal are graded once.
"""
