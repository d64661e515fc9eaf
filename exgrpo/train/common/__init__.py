"""What every room uses: errors, records, processes, seeds and functions by name."""
