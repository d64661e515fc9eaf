"""Named rewards, what a success is, and the processes that grade."""
