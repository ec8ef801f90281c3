"""The reference in docs/reference, generated from the command lines' own definitions: apps and dataclasses of settings."""
