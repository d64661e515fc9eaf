"""Before a launch: memory, disk and time of a recipe on given GPUs."""
