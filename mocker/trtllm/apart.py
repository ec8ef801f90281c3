"""TensorRT-LLM's scheduler as the core of a context server or of a generation server.

    context       is_remote_decode     a sequence ends with its first token; its blocks are kept until `release_kept`
    generation    is_remote_prefill    WAITING -- blocks --> LOADING -- `end_load` --> LOADED -- next step --> RUNNING

The states of the request are then INIT, TRANSFERRING and GENERATING. It gets its blocks before prompts that are computed here,
if all blocks to its end are free beside those of all that generate. While its KV is on its way, what it will need later does
not count, so that others may be given too much: then `OutOfBlocksError` says so. The recordings decide this
(`gen_init` in `tests/golden/trtllm`); the side of the context server was read, not recorded.

A generation server computes whole requests, too, and restarts one that it has paused by itself.
"""

from typing import Final

from mocker.batch import Batch
from mocker.contract import NeverAdmittedError, View
from mocker.models.kv_groups import KvLayout
from mocker.sequence import LOADED, LOADING, OVER, Sequence
from mocker.tiers.config import HostMemory
from mocker.trtllm.config import TrtllmConfig
from mocker.trtllm.core import TrtllmCore
from mocker.trtllm.request import Request


def new_trtllm_core(
    config: TrtllmConfig,
    num_blocks: int,
    host: HostMemory | None = None,
    layout: KvLayout | None = None,
    *,
    kv_events: bool = True,
) -> TrtllmCore:
    """Return an idle core for the role that the settings give; see `new_engine` for the arguments."""
    core = CORES.get(config.server_role, TrtllmCore)
    return core(config, num_blocks, host, layout, kv_events=kv_events)


class TrtllmContextCore(TrtllmCore):
    """The core of a server that computes prompts for others."""

    def __init__(
        self,
        config: TrtllmConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        super().__init__(config, num_blocks, host, layout, kv_events=kv_events)
        self._kept: dict[Sequence, Request] = {}

    def _remove(self, ended: list[Request]) -> list[Sequence]:
        finished = super()._remove(ended)
        for request in ended:
            if request.blocks:
                self._keep(request, is_wanted=request.sequence in finished)
        return finished

    def _keep(self, request: Request, *, is_wanted: bool) -> None:
        """Keep the blocks of a computed prompt, unless it was cancelled as it ended."""
        self._kept[request.sequence] = request
        if not is_wanted:
            self.release_kept(request.sequence)

    def release_kept(self, sequence: Sequence) -> None:
        """See `Core`."""
        request = self._kept.pop(sequence, None)
        if request is not None:
            self.pool.release(request.blocks)
            request.blocks = []

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`: KV that is kept leaves room when it is read."""
        return None if self._kept else super().stall()

    def view(self) -> View:
        """See `Core`."""
        return super().view()._replace(num_retained=len(self._kept))


class TrtllmGenerationCore(TrtllmCore):
    """The core of a server that answers requests whose prompts others compute."""

    def __init__(
        self,
        config: TrtllmConfig,
        num_blocks: int,
        host: HostMemory | None = None,
        layout: KvLayout | None = None,
        *,
        kv_events: bool = True,
    ) -> None:
        super().__init__(config, num_blocks, host, layout, kv_events=kv_events)
        self._loading: dict[Sequence, Request] = {}
        """Those whose KV is on its way, aborted ones included."""
        self._arrived: dict[Sequence, Request] = {}
        """Those whose KV has arrived, and which no step has been scheduled with."""
        self._late: dict[Sequence, None] = {}
        """Those that started and did not generate since."""

    # Iterations

    def _begin_loads(self, requests: list[Request]) -> None:
        for request in requests:
            sequence = request.sequence
            if sequence.state == OVER:  # cancelled; it leaves at the end of this iteration
                continue
            sequence.is_remote_prefill = False
            sequence.state = LOADING
            self._loading[sequence] = request
            self.prefix_cache_stats.count(sequence, 0)
            self.prefix_cache_stats.count_load(sequence, request.num_prompt)
            self.outbox.loads.append(sequence)

    def _describe_arrived(self, batch: Batch) -> None:
        for sequence, request in self._arrived.items():
            self._requests.start(request)
            sequence.num_computed = request.num_prompt
            sequence.decoding = True
            batch.admitted = [*batch.admitted, sequence]
            self.outbox.shipped.append(sequence)
            self._late[sequence] = None
        if self._arrived:
            self._arrived = {}

    def _describe_late(self, batch: Batch) -> None:
        """Record who generates for the first time since it started: its gap began then, not with the iteration."""
        if not self._late:
            return
        for sequence in batch.preempted:
            self._late.pop(sequence, None)
        late = [sequence for sequence in batch.decodes if sequence in self._late]
        starved = set(batch.delayed)
        batch.delayed = [*batch.delayed, *[sequence for sequence in late if sequence not in starved]]
        batch.sampled = late
        decoding = set(late)
        self._late = {each: None for each in self._late if each not in decoding and not each.is_over}

    # Sequences

    def add(self, sequence: Sequence) -> None:
        """See `Core`; the first token of an answer comes with its KV."""
        super().add(sequence)
        if sequence.is_remote_prefill:
            sequence.is_token_shipped = True

    def abort(self, sequence: Sequence) -> None:
        """See `Core`; one whose KV is on its way keeps its blocks until that has arrived."""
        if sequence.state == LOADING:
            sequence.state = OVER
        elif sequence.state == LOADED:
            sequence.state = OVER
            self._leave(self._arrived.pop(sequence), has_kv=True)
        else:
            super().abort(sequence)

    def _leave(self, request: Request, *, has_kv: bool) -> None:
        self._ranks[0].leave(request, has_kv=has_kv)
        self._requests.remove(request)
        self._steady = None

    def end_load(self, sequence: Sequence, num_valid_blocks: int | None = None) -> bool:
        """See `Core`; a request whose KV did not arrive fails."""
        request = self._loading.pop(sequence)
        is_missing = num_valid_blocks is not None
        if sequence.state == OVER:
            self._leave(request, has_kv=not is_missing)
            return False
        self._steady = None
        if is_missing or request.last_output == 1:
            sequence.is_failed = is_missing
            request.num_outputs = int(not is_missing)
            self._leave(request, has_kv=not is_missing)
            return True
        self.scheduler.end_transfer(request)
        sequence.state = LOADED
        self._arrived[sequence] = request
        return False

    # What it is doing

    @property
    def num_queued(self) -> int:
        """See `Core`."""
        return self.num_waiting - len(self._loading) - len(self._arrived)

    @property
    def is_stuck(self) -> bool:
        """See `Core`: what arrives may change it."""
        return super().is_stuck and not (self._loading or self._arrived)

    def stall(self) -> NeverAdmittedError | None:
        """See `Core`."""
        return None if self._loading or self._arrived else super().stall()

    def view(self) -> View:
        """See `Core`."""
        num_aborted = sum([sequence.is_over for sequence in self._loading])
        return (
            super()
            .view()
            ._replace(
                num_to_load=sum([sequence.is_remote_prefill for sequence in self._requests.of]),
                num_loading=len(self._loading) - num_aborted,
                num_loaded=len(self._arrived),
                num_retained=num_aborted,
            )
        )


CORES: Final[dict[str | None, type[TrtllmCore]]] = {"context": TrtllmContextCore, "generation": TrtllmGenerationCore}
"""Cores for a role, by `server_role`."""
