"""The planner core: how many workers each pool should have. Observations in, decisions out; no clock, no I/O."""
