"""What goes wrong in a rehearsal."""
