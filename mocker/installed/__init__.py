"""The scheduler of an installed engine as the core of a simulated one: slow, and the judge of ours."""
