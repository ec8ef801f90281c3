"""Models: their cards, files and tokenizers."""
