"""Find how many GPUs a workload needs, and in which layout: the search behind `dynabench plan`."""
