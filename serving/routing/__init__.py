"""The router fed by a live system."""
