"""The mocker as a live engine: a simulated engine core for each rank, and what the ranks share."""

import asyncio
from collections.abc import Callable
from collections.abc import Sequence as Several
from dataclasses import replace

import msgspec

from mocker import EngineConfig, SglangConfig, TrtllmConfig
from mocker.config import EngineTypeConfig, FamilyConfig, SimulatedConfig, in_role, timed_as, type_of, with_block_size
from mocker.tiers.config import HostMemory, refuse_idle_tiers
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.config import TimingConfig
from mocker.timing.kv_size import kv_size_of
from serving.engines.kv import params as kv_params
from serving.engines.kv.exchange import KvExchange
from serving.engines.kv.params import RemoteKv
from serving.engines.kv.reader import OnUsed, Spoil
from serving.engines.mock.answers.author import Author, embedding_size_of
from serving.engines.mock.config import AnswerConfig
from serving.engines.mock.costs import step_costs_of
from serving.engines.mock.events import EventSink, RouterSink
from serving.engines.mock.kv import nixl_peer
from serving.engines.mock.kv.handover import Handover, hand_over
from serving.engines.mock.kv.nixl_peer import NixlPeer
from serving.engines.mock.kv.passage import KvShape
from serving.engines.mock.kv.peer import become_peer
from serving.engines.mock.kv.store import chunk_format
from serving.engines.mock.kv.tiers import LiveTiers, with_store
from serving.engines.mock.observer import Observer
from serving.engines.mock.rank import MockEngine
from serving.engines.mock.stepping import step_together
from serving.kv_tiers.tier import ChunkFormat
from serving.life.lease import LeaseConfig
from serving.model.card import Bootstrap
from serving.model.constraints import NO_GRAMMAR
from serving.model.context import BYTES_CONTEXT
from serving.model.files import ModelFiles
from serving.model.tokenizer import load_tokenizer
from serving.role import KV_ROLES
from serving.runtime.server import AnswerStream
from serving.transfer.agent import TransferError
from serving.transfer.config import TransferRunConfig
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineCall, EngineError, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import PreprocessedRequest

POLL_S = 0.02

MAX_WAITING = 4096
"""Most requests that may wait for a place in a rank's batch, unless a mocker is told otherwise."""

TOOL_CALL_PARSER = "hermes"
"""The format in which a mocker calls tools, unless its model's is named."""

__all__ = [
    "AnswerConfig",
    "EngineConfig",
    "EngineTypeConfig",
    "FamilyConfig",
    "MockEngine",
    "Mocker",
    "SglangConfig",
    "SimulatedConfig",
    "TimingConfig",
    "TrtllmConfig",
    "refuse_idle_tiers",
    "with_block_size",
]


class Mocker:
    """The mocker as an engine (see `serving.worker.engine.Engine`): one simulated engine for each data-parallel rank."""

    def __init__(
        self,
        worker: WorkerConfig,
        config: FamilyConfig,
        timing: TimingConfig = TimingConfig(),  # noqa: B008 (frozen)
        *,
        answers: AnswerConfig = AnswerConfig(),  # noqa: B008
        transfer: TransferRunConfig = TransferRunConfig(),  # noqa: B008
        lease: LeaseConfig = LeaseConfig(),  # noqa: B008
        max_loras: int | None = None,
        max_waiting: int | None = MAX_WAITING,
        peers: Several[NixlPeer] = (),
    ) -> None:
        """Determine the engine's step times and blocks; nothing runs yet.

        Args:
            worker: what is served, and which part of each request.
            config: settings of the simulated engine, except for its role.
            timing: its step times.
            answers: what its answers are like.
            transfer: how KV travels, if requests are shared with other workers.
            lease: how long a prefill worker keeps KV.
            max_loras: adapters that may run in one step, with room and time for them left out (none: as the settings say).
            max_waiting: requests that may wait at a rank, which refuses more (None: any number, as in vLLM).
            peers: what each rank is to other instances, if clients send requests from one to another.

        Raises:
            ValueError: the settings do not determine them.
        """
        kv_role = peers[0].role if peers else KV_ROLES[worker.role]
        if not isinstance(config, EngineConfig) and config.kv_role not in (None, kv_role):
            raise ValueError(
                f"the settings are those of a {config.kv_role} and role is {worker.role!r}; expected disaggregation_mode and "
                "server_role not to be set: the role determines them"
            )
        config = in_role(config, kv_role)
        self._kind = type_of(config)
        timing = timed_as(self._kind, timing)
        self.calls = (EngineCall("mocker.Engine", {"config": config, "timing": timing}),)
        simulated = with_seats(resolve(config, timing), max_loras)
        self._simulated = replace(simulated, host=with_store(simulated.host, transfer))
        most = simulated.config.max_model_len
        self.traits = EngineTraits(
            block_size=config.block_size,
            context_length=most
            or (None if worker.model_path else min(self._simulated.longest_sequence, BYTES_CONTEXT)),
            num_ranks=simulated.num_engines,
            has_kv_events=worker.kv_events and simulated.num_ranks == 1,  # without a cache, there are none to miss
            step_costs=step_costs_of(simulated),
            guided_decoding=NO_GRAMMAR,
            continues_constrained=True,
            has_embeddings=True,
            adapters=config.adapter_names if isinstance(config, EngineConfig) else (),
            tool_call_parser=TOOL_CALL_PARSER,
        )
        self._answers = answers
        self._parser = worker.tool_call_parser or TOOL_CALL_PARSER
        self._role = worker.role
        self._transfer = transfer
        self._lease = lease
        self._max_waiting = max_waiting
        self._peers = peers
        self._shape: KvShape | None = None
        """What its KV is like for other workers, if it shares requests with any."""
        if kv_role:
            size = kv_size_of(timing, block_size=config.block_size, kv_bytes_per_token=transfer.kv_bytes_per_token)
            self._shape = KvShape(size, timing.tensor_parallel_size)
        self._format: ChunkFormat | None = None
        """What its chunks are like in the store, if there is one."""
        if self._simulated.host is not None and transfer.kv_store:
            self._format = chunk_format(
                self._simulated.host,
                transfer,
                timing,
                block_size=config.block_size,
                model=worker.model_path or worker.model_name,
            )
        self._token: Callable[[], bytes] | None = None
        self._handovers: list[Handover] = []
        """One of all ranks, or one of each if they are peers of others."""
        self._tiers: list[LiveTiers] = []
        self.observers: Several[Observer] = ()
        """Those who see what happens at each rank, if anybody does; they are set before the ranks run."""
        self.on_used: OnUsed | None = None
        """Who sees the bytes of KV that comes from elsewhere and is used, if anybody does; set before it starts."""
        self._author: Author | None = None
        self.ranks: list[MockEngine] = []
        self._stepping: list[asyncio.Task[None]] = []
        self._decode = msgspec.msgpack.Decoder(PreprocessedRequest).decode

    @property
    def needs_token(self) -> bool:
        """See `TransferringEngine`."""
        return self._role != "aggregated" or bool(self._transfer.kv_store)

    def transfer_with(self, token: Callable[[], bytes]) -> None:
        """See `TransferringEngine`."""
        self._token = token

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        self._author = await asyncio.to_thread(self._author_of, files)
        self.traits = replace(self.traits, guided_decoding=self._author.forms)
        if self._shape is not None:
            try:
                await self._start_handovers(self._shape)
            except TransferError as error:
                raise EngineError(f"KV cannot be transferred: {error}") from error
            self.traits = replace(self.traits, bootstrap=self._bootstrap(self._handovers[0]))
        if self._simulated.host is not None:
            await self._start_tiers(self._simulated.host)
        if self.on_used is not None:
            for handover in self._handovers:
                handover.watch_loads(self.on_used)
            for tiers in self._tiers:
                tiers.watch_reads(self.on_used)

    def _bootstrap(self, handover: Handover) -> Bootstrap | None:
        """Return how both workers of a request meet: always in SGLang, never in TensorRT-LLM, in vLLM if that is asked for."""
        bootstrap = handover.bootstrap
        match self._kind:
            case "sglang" if bootstrap is not None:
                return Bootstrap(bootstrap.params, is_needed=True)
            case "trtllm":
                return None
            case _:
                return bootstrap

    async def _start_handovers(self, shape: KvShape) -> None:
        for peer in self._peers:
            self._handovers.append(await become_peer(peer, shape, self._transfer, self._lease))
        if not self._peers:
            exchange = KvExchange(self._transfer, self._token)
            await exchange.start()
            self._handovers.append(hand_over(self._role, exchange, shape, self._transfer, self._lease))

    def _author_of(self, files: ModelFiles) -> Author:
        try:
            return Author(
                load_tokenizer(files),
                self._answers,
                tool_call_parser=self._parser,
                embedding_size=embedding_size_of(files),
            )
        except ValueError as error:
            raise EngineError(str(error)) from error

    async def _start_tiers(self, memory: HostMemory) -> None:
        for _ in range(self.traits.num_ranks):
            tiers = LiveTiers(memory, format=self._format, transfer=self._transfer, token=self._secret)
            self._tiers.append(tiers)
            await tiers.start()

    def _secret(self) -> bytes:
        return b"" if self._token is None else self._token()

    def publish_to(self, publishers: Several[KvEventPublisher]) -> None:
        """See `Engine`."""
        self.run([RouterSink(publisher) for publisher in publishers])

    def run(self, events: Several[EventSink] = ()) -> None:
        """Run the engines of all ranks; if sinks are given, one for each, they hear of their KV events."""
        bell = asyncio.Event() if self._simulated.is_lockstep else None
        self.ranks = [
            MockEngine(
                self._simulated,
                events=events[rank] if events else None,
                author=self._author,
                max_waiting=self._max_waiting,
                handover=self._handovers[min(rank, len(self._handovers) - 1)] if self._handovers else None,
                part_of=nixl_peer.part_of if self._peers else kv_params.part_of,
                tiers=self._tiers[rank] if self._tiers else None,
                observer=self.observers[rank] if self.observers else None,
                bell=bell,
            )
            for rank in range(self.traits.num_ranks)
        ]
        together = [self.ranks] if self._simulated.is_lockstep else [[rank] for rank in self.ranks]
        self._stepping = [asyncio.create_task(step_together(ranks)) for ranks in together]

    def service(self, request: msgspec.Raw, stream: AnswerStream) -> None:
        """See `Engine`."""
        asked = self._decode(request)
        if not 0 <= asked.dp_rank < len(self.ranks):
            stream.end(f"there is no rank {asked.dp_rank}; this worker has {len(self.ranks)}", "invalid")
            return
        self.ranks[asked.dp_rank].submit(asked, stream)

    @property
    def num_prefilling_tokens(self) -> int:
        """Tokens of the prompts that have no token yet: of whole prompts, however much of them is computed."""
        sequences = [one for rank in self.ranks for one in rank.engine.sequences()]
        return sum(one.num_prompt for one in sequences if one.first_token_s < 0)

    def offers(self, kv: RemoteKv) -> bool:
        """Return whether it keeps this KV for another worker."""
        return any(each.offers(kv) for each in self._handovers)

    def spoil_loads(self, spoil: Spoil) -> None:
        """Make KV that others computed unreadable, on purpose (see `KvReader.spoil`)."""
        for each in self._handovers:
            each.spoil_loads(spoil)

    def slow_disks(self, added_s: float) -> None:
        """Make each look-up, read and write of its disks take so much longer than usual (s)."""
        for tiers in self._tiers:
            tiers.slow_disk(added_s)

    def fill_disks(self, is_full: bool) -> None:
        """Let its disks have no room for more, or let them have their room again."""
        for tiers in self._tiers:
            tiers.fill_disk(is_full)

    def slow_down(self, factor: float) -> None:
        """Make each step, from the next on, take this many times as long as usual."""
        for rank in self.ranks:
            rank.slow_down(factor)

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        found = self.ranks[rank].load()
        if rank >= len(self._handovers):
            return found
        return found._replace(kv_transfers=self._handovers[rank].transfers())

    async def released(self) -> None:
        """See `HoldingEngine`."""
        while any(each.transfers().num_held for each in self._handovers):
            await asyncio.sleep(POLL_S)

    async def failed(self) -> None:
        """See `Engine`."""
        done, _ = await asyncio.wait(self._stepping, return_when=asyncio.FIRST_COMPLETED)
        await next(task for task in self._stepping if task in done)

    async def close(self) -> None:
        """See `Engine`."""
        for task in self._stepping:
            task.cancel()
        await asyncio.gather(*self._stepping, return_exceptions=True)
        for each in self._handovers:
            await each.close()
        for tiers in self._tiers:
            await tiers.close()


def with_seats(simulated: SimulatedEngine, max_loras: int | None) -> SimulatedEngine:
    """Let an engine run adapters whose loading somebody else simulates; None: change nothing.

    Raises:
        ValueError: its family has none.
    """
    config = simulated.settings
    if max_loras is None:
        return simulated
    if not isinstance(config, EngineConfig):
        raise ValueError(f"max_loras is {max_loras}; expected none: only vLLM's scheduler is modelled with adapters")
    config = replace(config, enable_lora=True, max_loras=max_loras)
    return replace(simulated, config=config, settings=config)
