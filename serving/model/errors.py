"""Errors of models."""


class ModelError(Exception):
    """A model cannot be served; the message says why, and what would help."""
