"""The numbers of a step, and the files, screens and trackers that show them."""
