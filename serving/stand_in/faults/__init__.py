"""Faults on purpose, for people who test what stands in front of a server: which befalls which request, and their port."""
