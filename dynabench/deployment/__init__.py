"""Descriptions of deployments, and what follows from them."""
