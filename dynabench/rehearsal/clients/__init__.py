"""The clients of a rehearsal."""
