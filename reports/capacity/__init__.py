"""What a capacity plan found, and its report."""
