"""Stand-ins for other engines' servers: one process that others cannot tell from the real one, and no GPU."""
