"""What may be concluded from figures, and in which words."""
