"""Answers in progress: what they are made of, how each API writes them, and how they are sent."""
