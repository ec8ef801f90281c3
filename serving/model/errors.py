"""What goes wrong with models."""


class ModelError(Exception):
    """A model that cannot be served; the message says why and what would help."""
