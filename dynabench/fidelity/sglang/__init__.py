"""Recordings of SGLang's scheduler: read, and replayed through the scheduler of its family."""
