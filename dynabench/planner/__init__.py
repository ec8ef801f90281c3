"""A planner and its hands: how the planner observes pools, and how its decisions are carried out."""
