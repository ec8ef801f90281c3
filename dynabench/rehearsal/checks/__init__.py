"""What must always hold in a rehearsal."""
