"""Two schedulers on one workload: where they part, which rule it is, and what that costs."""
