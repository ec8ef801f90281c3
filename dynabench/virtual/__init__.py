"""A run in virtual time."""
