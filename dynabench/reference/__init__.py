"""The reference in docs/reference, made from what makes the command lines: their apps and the dataclasses of settings."""
