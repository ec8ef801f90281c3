"""What a sweep or a search found: its points, its table, its verdict, its report."""
