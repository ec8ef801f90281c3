"""The level of logging below `logging.DEBUG`."""

TRACE = 5
"""For what is logged for every message that travels."""
