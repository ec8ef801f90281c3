"""The scheduler's side of offloading for an engine without host memory."""

from collections.abc import Iterable

from mocker.contract import Outbox
from mocker.sequence import Sequence
from mocker.tiers.config import HostMemory
from mocker.tiers.copies import NO_WORK, Work
from mocker.vllm.block_pool import BlockPool
from mocker.vllm.offload.offload import Offload


class NoOffload(Offload):
    """Finds nothing, accepts nothing and is always quiet, so that the scheduler need not ask whether there is any."""

    def __init__(self, pool: BlockPool) -> None:
        super().__init__(HostMemory(num_chunks=1), pool, 1, Outbox())

    def ask(self, sequence: Sequence, num_computed: int) -> int:
        """Find nothing."""
        return 0

    def is_fetching(self, sequence: Sequence) -> bool:
        """Return False: nothing is fetched."""
        return False

    def preempt(self, sequence: Sequence) -> None:
        """Do nothing: there are no copies to flush."""

    def end(self, sequence: Sequence, num_computed: int) -> None:
        """Do nothing: no block is watched."""

    def end_schedule(self, offers: Iterable[tuple[Sequence, int]]) -> bool:
        """Accept none."""
        return False

    def take_work(self) -> Work:
        """Return none."""
        return NO_WORK
