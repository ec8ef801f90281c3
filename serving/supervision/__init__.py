"""Processes that are started, watched and stopped as a group."""
