"""What speculation gives a step, by how many sequences it has: for reports in virtual time and of live runs."""

from mocker.timing.choose import SimulatedEngine
from mocker.timing.drafting import Speculating
from reports.record.pools import Gain
from workloads import Workload

STEP_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
"""Sequences in a step for which the report says what speculation gives."""


def gains_of(engine: SimulatedEngine, length: float, workload: Workload) -> tuple[Gain, ...]:
    """Return what steps of a mean length give, each sequence with the mean context of the workload's answers."""
    timing, columns = engine.timing, workload.columns
    if not isinstance(timing, Speculating):
        return ()
    context = int(columns.input_length.mean() + columns.output_length.mean() / 2)
    room = engine.num_usable_blocks // engine.num_blocks_decoding(context)
    sizes = [size for size in STEP_SIZES if size <= min(engine.config.max_num_seqs, room)]
    return tuple([Gain(size, timing.gain(size, size * context, length, len(engine.acceptance))) for size in sizes])
