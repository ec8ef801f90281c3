"""Time and connections of a rehearsal."""
