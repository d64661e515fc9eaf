"""Rewards by name, and the processes that grade with them."""
