"""Experiments: arms, repeats and sweeps, on either clock, with their results folders."""
