"""Conversion of a workload's block ids to an engine's block size."""

from collections.abc import Sequence

from mocker import BlockChain
from workloads import Request, WorkloadError


class Grouping:
    """Translates a workload's block ids to the engine's block size."""

    def __init__(
        self, trace_block: int, engine_block: int, setting: str = "block_size", adapters: Sequence[str] = ()
    ) -> None:
        """Translate between two block sizes, of which the engine's has a name, for requests with any of these adapters.

        Raises:
            WorkloadError: neither is a multiple of the other.
        """
        if trace_block % engine_block and engine_block % trace_block:
            raise WorkloadError(
                f"{setting} {engine_block} neither divides the workload's blocks of {trace_block} tokens nor is a multiple"
            )
        self._size = engine_block
        self._split = max(trace_block // engine_block, 1)
        self._join = max(engine_block // trace_block, 1)
        self._places = {name: place for place, name in enumerate(adapters, 1)}

    def chain(self, request: Request) -> BlockChain:
        """Return the block ids of a request's prompt; full blocks are shared, and the rest is the request's own."""
        ids = request.hash_ids
        if self._join > 1:  # ids are chained, so the last of a group identifies the whole group
            ids = ids[self._join - 1 :: self._join]
        if self._places:  # the same prompt has other KV with another adapter
            place, stride = self._places.get(request.adapter, 0), len(self._places) + 1
            ids = tuple([id * stride + place for id in ids])
        return BlockChain(ids, request.input_length // self._size, blocks_per_id=self._split)
