"""Figures computed from records, and the limits they are held against."""
