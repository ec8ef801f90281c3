"""The command line and the experiment: what to run, on which clock, into which folder."""
