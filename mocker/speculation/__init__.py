"""Speculative decoding: drafts of tokens, which a step of the model verifies."""
