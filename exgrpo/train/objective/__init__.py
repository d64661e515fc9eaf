"""The loss: which surrogate of the return, what keeps the policy near another one, and whose tokens count."""
