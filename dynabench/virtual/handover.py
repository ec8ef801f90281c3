"""Requests that one rank prefills and another decodes: their stages and KV transfers in virtual time.

    source first        place, prefill -> on_prefill_step -> place, decode -> on_loads -> transfer -> arrive, let_go
    destination first   place both -> on_loads -> prefill -> on_prefill_step -> transfer -> arrive, let_go
    bypassed            place, decode: that rank computes the prompt, too

`on_loads` is called when a decode rank has blocks for the prompt. Source first, the KV waits at the prefill rank until
it is read or its lease ends. Destination first, the request waits at the decode rank before anything is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from dynabench.deployment.transfer import TransferConfig
from dynabench.virtual.clock import ARRIVAL, Clock
from dynabench.virtual.losses import Losses
from dynabench.virtual.overlap import hidden_bytes
from dynabench.virtual.rank import Rank, number_of
from dynabench.virtual.routing import Routing
from dynabench.virtual.tiers import SourceColumns
from dynabench.virtual.traffic import Traffic
from mocker import BlockChain, StepOutput
from mocker import Sequence as EngineSequence
from mocker.timing.choose import SimulatedEngine
from mocker.timing.kv_size import KvSize
from reports.record.records import RequestLog
from serving.life import DisaggregationConfig, Life, PlaceAgain, Refused
from serving.life.bypass import bypasses
from serving.router import Decision, Prompt, Router
from serving.router.router import NoWorkersError
from workloads import Request

EXPIRED = "its KV had left the prefill worker before the decode worker could read it: the lease had expired"
GONE = "its KV had left the prefill worker before the decode worker could read it: that worker was gone"


class Disaggregation(NamedTuple):
    """The settings of a deployment with workers that only prefill."""

    config: DisaggregationConfig
    transfer: TransferConfig
    router: Router
    """Distributes the requests over the workers that prefill."""
    kv_size: KvSize
    """The size of the KV that is sent."""


@dataclass(slots=True)
class Journey:
    """A request on its way."""

    prompt: Prompt
    chain: BlockChain
    life: Life
    priority: int = 0
    prefilled: EngineSequence | None = None
    """Its sequence at the prefill rank."""
    source: int = -1
    has_blocks: bool = False
    """Whether a decode rank has blocks for its prompt and waits for its KV."""
    is_held: bool = False
    """Whether the prefill rank keeps its blocks to be read."""
    num_computed: int = 0
    """Tokens of its prompt that are computed, and blocks of them that are sent, before the prefill ends."""
    num_sent: int = 0
    is_under_way: bool = False
    """Whether its KV is being read."""
    decoded: EngineSequence | None = None
    """Its sequence at the decode rank, which renews the lease from then on."""
    target: int = -1


class Handover:
    """Brings requests from the workers that prefill to the workers that decode."""

    def __init__(
        self,
        settings: Disaggregation,
        engines: Sequence[SimulatedEngine],
        ranks: Sequence[Rank],
        decoding: Routing,
        clock: Clock,
        traffic: Traffic,
        log: RequestLog,
        losses: Losses,
        *,
        kv_event_delay_s: float,
        delay_s: float,
        decode: Callable[[int, Prompt, EngineSequence, int | None], None],
        sequence: Callable[[int, BlockChain], EngineSequence],
        note: Callable[[int, Decision, Router], None],
        forget: Callable[[int], None],
    ) -> None:
        """Connect ranks.

        Args:
            settings: how requests and their KV travel.
            engines: all engines of the deployment.
            ranks: all ranks, by number; more may be added.
            decoding: the router of the decode ranks.
            clock: the clock.
            traffic: the links between ranks.
            log: records when each stage of a request happened.
            losses: handles requests whose rank is gone.
            kv_event_delay_s: time until a KV event reaches a router (s).
            delay_s: time from the end of a prefill until it is placed for decoding (s).
            decode: sends a request to a rank that answers it: the router's choice or a given one.
            sequence: makes a request's sequence for that rank.
            note: records what a router knew when it placed a request.
            forget: withdraws a request from the router of the decode ranks.
        """
        self.settings = settings
        self.routing = Routing(settings.router, clock, kv_event_delay_s=kv_event_delay_s)
        self.traffic = traffic
        self._config = settings.config
        self._sends_chunks = settings.transfer.overlap == "chunk"
        self._is_destination_first = settings.config.flow == "destination-first"
        self._ranks = ranks
        self._sources = SourceColumns(engines, log)
        self._losses = losses
        self._decoding = decoding
        self._clock = clock
        self._log = log
        self._delay_s = delay_s
        self.delays_s = 0.0
        """Total of these delays over all requests (s)."""
        self._decode, self._sequence, self._note, self._forget = decode, sequence, note, forget
        self._journeys: dict[int, Journey] = {}
        self._block_size = engines[0].config.block_size

    def begin(self, number: int, prompt: Prompt, chain: BlockChain, request: Request) -> None:
        """Handle a request that has arrived."""
        journey = self._journeys[number] = Journey(prompt, chain, self._losses.life(number), request.priority)
        has_prefill = bool(self.routing.ranks)
        local = self._bypass(prompt, request.output_length) if has_prefill else None
        stage = journey.life.next_stage(now=self._clock.now, has_prefill=has_prefill, bypasses=local is not None)
        if isinstance(stage, Refused):
            self._give_up(number, journey)
            self._losses.on_nobody(number, stage.message, journey.life)
            return
        if stage == "decode":
            self._send_to_decode(number, journey, local)
            return
        # If a request with blocks waited here for one without, the latter might be waiting for these very blocks.
        if not (self._is_destination_first and self.routing.router.may_hold):
            self._choose_prefill(number, prompt)
        if self._is_destination_first and number in self._journeys:
            self._send_to_decode(number, journey, None)

    def _bypass(self, prompt: Prompt, output_length: int) -> int | None:
        """Return the slot of the decode rank that should compute this prompt itself, or None."""
        config = self._config
        if config.conditional_disagg == "never":
            return None
        there, here = self._decoding.peek(prompt, output_length), self.routing.peek(prompt, 1)
        engine = self._ranks[there.slot].engine
        block_size = self._block_size
        needed = -(-prompt.num_tokens // block_size) - there.gpu_blocks
        is_bypassed = bypasses(
            config,
            num_tokens=prompt.num_tokens,
            num_cached=there.overlap_blocks * block_size,
            prefill_tokens=self.routing.router.load(here.slot).prefill_tokens,
            decode_usage=(engine.num_blocks - engine.num_free_blocks + needed) / engine.num_blocks,
        )
        return there.slot if is_bypassed else None

    def _choose_prefill(self, number: int, prompt: Prompt) -> None:
        """Choose the rank that computes a prompt, unless the prompt has to wait at the router."""
        try:
            decision = self.routing.place(number, prompt, 1)
        except NoWorkersError as error:
            journey = self._journeys[number]
            self._give_up(number, journey)
            self._losses.on_nobody(number, str(error), journey.life)
            return
        if decision is not None:
            self._place_prefill(number, decision)

    def _place_prefill(self, number: int, decision: Decision) -> None:
        """Note the rank that computes a prompt; destination first, the prefill starts once there are blocks for it."""
        journey = self._journeys[number]
        self._note(number, decision, self.routing.router)
        journey.source = decision.slot
        if journey.has_blocks or not self._is_destination_first:
            self._prefill(number, journey)

    def _prefill(self, number: int, journey: Journey) -> None:
        """Send a prompt to the rank that computes it."""
        self._log.prefill_queued_s[number] = self._clock.now
        journey.prefilled = EngineSequence(
            number,
            num_prompt=journey.prompt.num_tokens,
            max_tokens=1,
            is_remote_decode=True,
            chain=journey.chain,
            priority=journey.priority,
            arrival=self._clock.now,
        )
        self._ranks[journey.source].add(journey.prefilled)

    def on_prefill_step(self, rank: Rank, output: StepOutput) -> None:
        """Pass on the output of a step of a prefill rank."""
        if self.routing.sends_events_at_once and rank.engine.effects.events:
            self.routing.on_events(rank)
        if self._sends_chunks:
            self._send_chunks(output)
        router = self.routing.router
        for sequence in output.finished:
            number = number_of(sequence)
            router.on_finish(number)
            journey = self._journeys[number]
            journey.is_held = True
            self._log.prefill_worker[number] = rank.number
            self._log.prefill_end_s[number] = output.end
            follows = journey.life.on_end("", "", rank.number, now=output.end)
            assert isinstance(follows, PlaceAgain), "only a prefilled sequence is placed for decoding"
            journey.life.next_stage(now=output.end, has_prefill=True)
            if self._is_destination_first:
                self._read(number, journey)
                continue
            if self._delay_s:
                self.delays_s += self._delay_s
                self._clock.at(
                    output.end + self._delay_s, ARRIVAL, partial(self._send_to_decode, number, journey, None)
                )
            else:
                self._send_to_decode(number, journey, None)
            if journey.decoded is None or not self._config.kv_lease_renewal:
                end = output.end + self._config.kv_lease_duration_s
                self._clock.at(end, ARRIVAL, partial(self._end_lease, number, journey))
        if output.finished:
            self.release()

    def release(self) -> None:
        """Send the requests that need not wait at the prefill workers' router any longer."""
        for number, decision in self.routing.release():
            self._place_prefill(number, decision)
        if not self.routing.ranks:
            for held in self.routing.router.held:
                assert isinstance(held, int)
                self._give_up(held, self._journeys[held])
                self._losses.dispatch_again(held)

    def _send_to_decode(self, number: int, journey: Journey, slot: int | None) -> None:
        if self._journeys.get(number) is not journey:
            return  # it has started again
        self._log.decode_queued_s[number] = self._clock.now
        sequence = self._sequence(number, journey.chain)
        sequence.is_remote_prefill = journey.life.stage == "prefill" or journey.life.is_prefilled
        sequence.is_token_shipped = sequence.is_remote_prefill and self._is_destination_first
        try:
            self._decode(number, journey.prompt, sequence, slot)
        except NoWorkersError as error:
            self._give_up(number, journey)
            self._losses.on_nobody(number, str(error), journey.life)

    def on_sent(self, number: int, sequence: EngineSequence, slot: int) -> None:
        """Note that a decode rank has a request."""
        journey = self._journeys[number]
        journey.decoded, journey.target = sequence, slot

    def _end_lease(self, number: int, journey: Journey) -> None:
        """End the lease of blocks that were not read in time, so that the prefill rank can reuse them."""
        if not journey.is_held:
            return
        if journey.decoded is not None and self._config.kv_lease_renewal:
            return
        self._let_go(journey)
        if journey.is_under_way:
            self.traffic.drop(number)
            self._arrive(number, journey, 0)

    def _let_go(self, journey: Journey) -> None:
        """Free the blocks at the prefill rank."""
        assert journey.prefilled is not None
        journey.is_held = False
        self._ranks[journey.source].let_go(journey.prefilled)

    def on_loads(self, sequences: list[EngineSequence]) -> None:
        """Continue with the sequences for which a decode rank has allocated blocks."""
        for sequence in sequences:
            number = number_of(sequence)
            self._log.decode_blocks_s[number] = self._clock.now
            journey = self._journeys[number]
            journey.has_blocks = True
            if not self._is_destination_first:
                self._read(number, journey)
            elif journey.source < 0:
                self._choose_prefill(number, journey.prompt)
            else:
                self._prefill(number, journey)

    def _read(self, number: int, journey: Journey) -> None:
        """Start reading KV, if it is still there."""
        now, sequence = self._clock.now, journey.decoded
        assert sequence is not None
        if not journey.is_under_way:
            self._log.transfer_start_s[number] = now
        if not journey.is_held:
            self._clock.at(now, ARRIVAL, partial(self._arrive, number, journey, 0))
            return
        if journey.is_under_way:
            return  # it is sent chunk by chunk
        count = -(-sequence.num_prompt // self._block_size) - sequence.num_cached_blocks
        num_bytes = self.settings.kv_size.of(count)
        hidden = self._num_hidden_bytes(journey, num_bytes)
        journey.is_under_way = True
        self.traffic.start(
            number,
            partial(self._end_transfer, number, journey),
            source=journey.source,
            target=journey.target,
            num_bytes=num_bytes - hidden,
            num_blocks=count,
            num_bytes_ahead=hidden,
        )

    def _num_hidden_bytes(self, journey: Journey, num_bytes: float) -> float:
        """Return the bytes that were sent layer by layer before the prefill ended."""
        assert journey.prefilled is not None
        if self.settings.transfer.overlap != "layer":
            return 0.0
        return hidden_bytes(
            num_bytes,
            bandwidth=self.traffic.links.bandwidth(journey.source, journey.target),
            prefill_s=self._clock.now - journey.prefilled.first_scheduled_s,
            num_layers=self.settings.kv_size.num_layers,
        )

    def _send_chunks(self, output: StepOutput) -> None:
        """Send the blocks that a step has filled, and all remaining blocks at the end of a prompt.

        A prompt that was preempted is computed again from its cached blocks, and its last token may be dropped, so its
        progress is unknown before its end.
        """
        for sequence, count in output.chunks:
            is_last = sequence in output.finished
            if (sequence.is_over or sequence.num_preemptions) and not is_last:
                continue
            number = number_of(sequence)
            journey = self._journeys[number]
            assert journey.decoded is not None
            journey.num_computed = max(journey.num_computed, sequence.cached_tokens) + count
            num_filled = (
                -(-sequence.num_prompt // self._block_size) if is_last else journey.num_computed // self._block_size
            )
            num_blocks = max(num_filled - max(journey.num_sent, journey.decoded.num_cached_blocks), 0)
            journey.num_sent = num_filled
            self._send_more(number, journey, num_blocks, is_last=is_last)

    def _send_more(self, number: int, journey: Journey, num_blocks: int, *, is_last: bool) -> None:
        now, num_bytes = self._clock.now, self.settings.kv_size.of(num_blocks)
        if journey.is_under_way:
            self.traffic.extend(number, num_bytes=num_bytes, num_blocks=num_blocks, is_last=is_last)
            return
        journey.is_under_way = True
        self._log.transfer_start_s[number] = now
        self.traffic.start(
            number,
            partial(self._end_transfer, number, journey),
            source=journey.source,
            target=journey.target,
            num_bytes=num_bytes,
            num_blocks=num_blocks,
            is_last=is_last,
        )

    def _end_transfer(self, number: int, journey: Journey) -> None:
        self._let_go(journey)
        self._arrive(number, journey, None)

    def _arrive(self, number: int, journey: Journey, num_valid_blocks: int | None) -> None:
        """Report to a decode rank that the KV it waits for has arrived, or is lost."""
        assert journey.decoded is not None
        journey.is_under_way = journey.has_blocks = False
        self._log.transfer_end_s[number] = self._clock.now
        self._ranks[journey.target].arrive(journey.decoded, num_valid_blocks)

    def on_decoded(self, number: int, sequence: EngineSequence, *, answer_s: float) -> None:
        """Complete the log of a request that has ended; its tokens reach the client `answer_s` later."""
        log, journey = self._log, self._journeys.pop(number)
        if sequence.is_failed:
            log.error[number] = GONE if self._ranks[journey.source].is_gone else EXPIRED
        log.decode_start_s[number] = sequence.first_scheduled_s
        if (prefilled := journey.prefilled) is not None:
            log.admitted_s[number] = prefilled.first_scheduled_s
            log.cached_tokens[number] = prefilled.cached_tokens
            self._sources.note(number, prefilled)
            log.preemptions[number] = prefilled.num_preemptions + sequence.num_preemptions

    def on_gone(self, rank: Rank) -> None:
        """Let the requests of a rank that is gone continue elsewhere; those that need its KV do without it."""
        if rank.prefills:
            self._on_prefill_gone(rank)
            return
        for sequence in rank.sequences:
            number = number_of(sequence)
            journey = self._journeys.get(number)
            if journey is not None and journey.decoded is sequence:  # it was not given up before
                self._give_up(number, journey)
                self._losses.on_lost(sequence, rank, journey.life)

    def on_kv_lost(self, number: int, source: Rank) -> None:
        """Restart a request, because the rank with its KV is gone."""
        journey = self._journeys[number]
        self._give_up(number, journey)
        self._losses.on_kv_lost(number, source, journey.life)

    def _on_prefill_gone(self, rank: Rank) -> None:
        lost = [(n, journey) for n, journey in self._journeys.items() if journey.source == rank.number]
        for number, journey in lost:
            prefilled = journey.prefilled
            if journey.is_held:
                journey.is_held = False
                if journey.is_under_way:
                    self.traffic.drop(number)
                    self._arrive(number, journey, 0)
            elif prefilled is None:
                self._give_up(number, journey)
                self._losses.dispatch_again(number)
            elif not prefilled.is_over:
                self._give_up(number, journey)
                self._losses.on_lost(prefilled, rank, journey.life)

    def _give_up(self, number: int, journey: Journey) -> None:
        """Cancel everything that is in progress for a request, which then starts again."""
        del self._journeys[number]
        if journey.is_under_way:
            self.traffic.drop(number)
        if journey.is_held:
            self._let_go(journey)
        elif journey.prefilled is not None and not journey.prefilled.is_over:
            self._ranks[journey.source].abort(journey.prefilled)
        if journey.decoded is not None and not journey.decoded.is_over:
            target = self._ranks[journey.target]
            target.abort(journey.decoded)
            if journey.has_blocks:
                target.arrive(journey.decoded, 0)  # the KV that it waited for will never come
        self.routing.forget(number)
        self._forget(number)
