"""Options of all rooms, recipes, the command line, and messages about wrong options."""
