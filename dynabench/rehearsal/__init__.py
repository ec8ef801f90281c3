"""The live code on virtual time."""
