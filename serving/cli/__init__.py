"""The command lines of the serving stack."""
