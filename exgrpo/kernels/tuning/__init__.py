"""What times calls on the machine at hand and writes the tables by which calls are computed; training never runs it."""
