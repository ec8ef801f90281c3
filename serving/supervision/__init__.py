"""Processes that are started, watched and ended as a group."""
