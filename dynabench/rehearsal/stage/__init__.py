"""The programs of a deployment in one process."""
