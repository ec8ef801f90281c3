"""Workloads that several tests send."""

from workloads import Workload
from workloads.synthesize import SynthConfig, synthesize


def conversations(count, **dials):
    """Make a workload of conversations of some turns, in blocks of 512 tokens."""
    dials = {"turns": 3, "isl": 900, "osl": 60, "prefix_groups": 5} | dials
    return Workload("w", 512, synthesize(SynthConfig(requests=count, **dials)))
