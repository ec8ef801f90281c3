"""Engines behind one protocol, one file each."""
