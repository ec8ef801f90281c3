"""Recordings of vLLM's scheduler: made with an installed vLLM, read, and replayed through the core of its family."""
