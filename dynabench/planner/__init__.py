"""A planner and its hands: what it sees of pools, and what carries out its decisions."""
