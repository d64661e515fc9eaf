"""The program `exgrpo experience`: show and export stored answers of runs, and import those of others."""
