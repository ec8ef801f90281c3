"""How many GPUs, and in which layout: the search behind `dynabench plan`."""
