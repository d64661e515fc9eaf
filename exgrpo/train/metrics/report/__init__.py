"""HTML report about runs, from the files in their folders."""
