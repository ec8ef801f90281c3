"""The requests of a workload, as routers and engines see them."""

from collections.abc import Sequence
from typing import NamedTuple

from dynabench.deployment.engines import ANY_LENGTH, SimulatedPool, context_of, longest_of
from dynabench.virtual.grouping import Grouping
from mocker import BlockChain
from mocker import Sequence as EngineSequence
from mocker.config import own_name
from mocker.media import MediaItem
from serving.life.flight import Flight
from serving.router import Prompt, PromptBlocks
from workloads import Request, Workload


class Prepared(NamedTuple):
    """The prompt of a request, with the part of its answer that there is."""

    prompt: Prompt
    """For routers."""
    chain: BlockChain
    """The names of its blocks, for engines."""
    request: Request


class Prompts:
    """Makes prompts, and sequences of engines, of a workload's requests."""

    def __init__(self, workload: Workload, pools: Sequence[SimulatedPool]) -> None:
        """Prepare the requests of a workload for pools, all of which use KV blocks of the same size."""
        present = [pool.engine for pool in pools if pool.replicas]
        self.block_size = pools[0].engine.config.block_size
        self.longest = longest_of(present)
        """The longest requests that the engines take."""
        self.has_limits = self.longest != ANY_LENGTH
        self._context = context_of(present)
        self.columns = workload.columns
        self._grouping = Grouping(
            workload.block_size,
            self.block_size,
            own_name(pools[0].engine.settings, "block_size"),
            workload.columns.adapters,
        )

    def refusal(self, number: int) -> str | None:
        """Return why the frontend refuses a request, None if it does not."""
        return self.longest.refusal(*self.columns.lengths(number))

    def prepare(self, flight: Flight) -> Prepared:
        """Return what is sent for a request, including tokens generated so far."""
        before = flight.payload
        request = before.request if isinstance(before, Prepared) else self.columns[flight.number]
        chain = self._grouping.chain(request)
        blocks = PromptBlocks(chain.ids, chain.num_named, chain.blocks_per_id)
        num_tokens = request.input_length if flight.generated is None else request.input_length + flight.num_generated
        return Prepared(Prompt(num_tokens, blocks, request.session or None, request.adapter), chain, request)

    def to_decode(self, flight: Flight, prepared: Prepared, now: float) -> EngineSequence:
        """Return a request's sequence for the rank that answers it; one that ends by EOS has a limit beyond that."""
        request, generated = prepared.request, flight.generated
        num_generated = 0 if generated is None else generated.num_tokens
        sequence = EngineSequence(
            flight.number,
            num_prompt=request.input_length + num_generated,
            max_tokens=request.max_tokens(self._context) - num_generated,
            stop_after=request.output_length - num_generated if request.ends == "stop" else None,
            chain=prepared.chain,
            priority=request.priority,
            adapter=request.adapter,
            arrival=now,
            media=_items(request) if request.media else (),
        )
        if generated is not None:  # its first token came earlier, and it has waited since the last one
            sequence.first_token_s, sequence.waited_since_s = generated.first_token_s, generated.last_token_s
        return sequence

    def to_prefill(self, flight: Flight, prepared: Prepared, now: float) -> EngineSequence:
        """Return a request's sequence for a rank that only computes its prompt."""
        return EngineSequence(
            flight.number,
            num_prompt=prepared.prompt.num_tokens,
            max_tokens=1,
            is_remote_decode=True,
            chain=prepared.chain,
            priority=prepared.request.priority,
            adapter=prepared.request.adapter,
            arrival=now,
            media=_items(prepared.request) if prepared.request.media else (),
        )


def _items(request: Request) -> tuple[MediaItem, ...]:
    """Return the media of a request, for engines."""
    return tuple([MediaItem(item.offset, item.tokens, item.id) for item in request.media])
