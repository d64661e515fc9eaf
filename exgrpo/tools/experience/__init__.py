"""The program `exgrpo experience`: stored answers of runs, shown and exported, and those of others, imported."""
