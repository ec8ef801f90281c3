"""Runs over HTTP on the wall clock."""
