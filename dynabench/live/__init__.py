"""A run over HTTP, on the wall clock."""
