"""What to run, on which clock, into which folder."""
