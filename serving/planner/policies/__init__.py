"""Planner policies: one file each."""
