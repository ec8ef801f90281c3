"""Replay a recording of a real scheduler through the mocker's, and show the first difference."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace

from dynabench.fidelity.recordings import MALFORMED, Json, RecordingError, Verdict, why_unreadable
from dynabench.fidelity.vllm.recordings import CACHE_STATS, Action, Recording, Scheduled, Updated
from foundation.text import one_line
from mocker import AllBlocksCleared, BlockChain, BlockStored, Sequence
from mocker.batch import Batch
from mocker.events import BlockEvent, GroupRemoved, GroupStored, TierRemoved, TierStored
from mocker.media import MediaItem
from mocker.sequence import LOADED, LOADING
from mocker.speculation.drafter import Drafter
from mocker.tiers.copies import SequenceCopy
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig
from mocker.timing.model import Prefill, TimingModel, chunk
from mocker.vllm.core import VllmCore
from mocker.vllm.groups.blocks import GroupedBlocks
from mocker.vllm.offload.offload import Offload


def verify(recording: Recording, *, is_counted: bool = False) -> Verdict:
    """Replay a recording step by step and stop at the first difference.

    Args:
        recording: what vLLM did.
        is_counted: count tokens in each iteration, even where they have a closed form (see `VllmCore`).

    Raises:
        RecordingError: it cannot be replayed: requests or steps are missing.
    """
    num_steps = num_events = 0
    try:
        replay = _Replay(recording, is_counted=is_counted)
    except ValueError as error:
        raise RecordingError(f"{recording.path}: cannot be replayed ({one_line(error)})") from error
    for entry in recording.entries:
        try:
            difference = replay.compare(entry)
        except MALFORMED as error:
            where = f"{recording.path}, after step {num_steps - 1}" if num_steps else str(recording.path)
            raise RecordingError(f"{where}: cannot be replayed ({why_unreadable(error)})") from error
        if difference is not None:
            return Verdict(recording.path, "vllm", recording.version, num_steps, num_events, difference)
        num_steps += isinstance(entry, Scheduled)
        num_events += len(entry.events) if isinstance(entry, Updated) else 0
    if replay.num_unfinished:
        raise RecordingError(
            f"{recording.path}: ends after {num_steps} steps, but {replay.num_unfinished} of its requests are "
            "unfinished"
        )
    return Verdict(recording.path, "vllm", recording.version, num_steps, num_events, None)


class Lookup:
    """A sequence's search for cached tokens, here and at other engines, with the state at that time."""

    def __init__(self, sequence: Sequence, num_hits: int, num_hits_elsewhere: int = 0) -> None:
        self.prefix = "preempted_" if sequence.num_preemptions else ""
        self.num_known = sequence.num_known
        self.num_hits = num_hits
        self.num_hits_elsewhere = num_hits_elsewhere


class _RecordedDrafter(Drafter):
    """Answers with what was recorded with the step that ends."""

    def __init__(self) -> None:
        self.entry: Updated | None = None

    def proposed(self, sequence: Sequence) -> int:
        """See `Drafter`."""
        assert self.entry is not None
        return self.entry.drafts.get(str(sequence.id), 0)

    def accepted(self, sequence: Sequence, num_drafts: int) -> int:
        """See `Drafter`."""
        assert self.entry is not None
        return self.entry.accepted[str(sequence.id)]


class _Replay:
    """The mocker's scheduler, driven like vLLM's."""

    def __init__(self, recording: Recording, *, is_counted: bool) -> None:
        config = recording.config
        if config.num_gpu_blocks is None:
            raise ValueError("num_gpu_blocks is not recorded")
        self._block_size = config.block_size
        self._drafter = _RecordedDrafter()
        self._scheduler = VllmCore(
            config,
            config.num_gpu_blocks,
            recording.offloading,
            recording.layout,
            max_loras=recording.max_loras,
            drafter=self._drafter,
            num_stages=recording.num_stages,
            is_counted=is_counted,
        )
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[Batch | None] = deque()
        self._names: dict[Hashable, Hashable] = {}  # vLLM's hash -> our name of that content
        self._lookups: list[Lookup] = []  # since the last step ended
        self._loaded: set[Sequence] = set()  # sequences whose KV arrived
        self._aborted: list[Sequence] = []  # since the last step was scheduled, like the next
        self._handed_over: list[Sequence] = []
        self._in_slots: dict[int, Hashable] = {}  # vLLM's slot in host memory -> our name of its chunk
        self._flushed: set[int] = set()  # numbers of copies
        self._host_hashes: set[Hashable] = set()  # vLLM's hashes that identify chunks

    @property
    def num_unfinished(self) -> int:
        """Requests that still wait or run."""
        scheduler = self._scheduler
        return len(scheduler.running) + scheduler.num_waiting

    def compare(self, entry: Action | Scheduled | Updated) -> Json | None:
        """Repeat a recorded call, and return the first difference in its result."""
        if isinstance(entry, Action):
            if entry.kind == "abort" and not (sequence := self._sequences[entry.id]).is_over:
                self._aborted.append(sequence)
            is_done = _act(self._scheduler, self._sequences, entry, self._block_size)
            return None if is_done is entry.is_done else _difference(None, "reset", entry.is_done, is_done)
        if isinstance(entry, Scheduled):
            self._scheduler.offload.ended.sort(key=lambda end: [*entry.ended, end[0].id].index(end[0].id))
            return _first_difference(entry, self._schedule(entry))
        if not self._in_flight:
            raise ValueError(f"step {entry.number} ends but was never scheduled")
        in_flight = self._in_flight.popleft()
        return _first_difference(entry, self._update(in_flight, entry)) or self._compare_events(entry)

    def _schedule(self, entry: Scheduled) -> Json:
        scheduler = self._scheduler
        batch = scheduler.schedule()
        self._in_flight.append(batch)
        facts: Json = {"scheduled": {}, "drafts": {}, "new": {}, "resumed": [], "preempted": []}
        if batch is not None:
            facts["scheduled"] = {sequence.id: count for sequence, count in scheduler.num_new_tokens(batch)}
            if scheduler.is_counted:
                facts["drafts"] = {sequence.id: count for sequence, count in batch.drafts.items()}
            counts = dict(batch.chunks)
            facts["new"] = {sequence.id: sequence.num_computed - counts[sequence] for sequence in batch.admitted}
            facts["resumed"] = [sequence.id for sequence in batch.resumed]
            facts["preempted"] = sorted(sequence.id for sequence in batch.preempted)
        facts |= self._tables(facts["scheduled"]) | self._encoded(batch)
        started = [] if batch is None else [*batch.admitted, *batch.resumed]
        copies = self._copies(scheduler.offload, entry)
        for sequence in started:
            hits = sequence.num_computed - counts[sequence]
            if sequence not in self._loaded or not hits:  # else it was counted when its load began
                self._lookups.append(Lookup(sequence, hits))
            self._loaded.discard(sequence)
        facts |= self._transfers(started) | self._state()
        return facts | copies

    def _tables(self, scheduled: Json) -> Json:
        """Return the blocks of a step's sequences by number, and where their prompts leave others', if there are groups."""
        blocks = self._scheduler.blocks
        if not isinstance(blocks, GroupedBlocks):
            return {}
        sequences = [self._sequences[id] for id in scheduled]
        junctions = {sequence.id: blocks.cache.junction(sequence) for sequence in sequences}
        return {
            "tables": {sequence.id: [list(table) for table in blocks.cache.tables(sequence)] for sequence in sequences},
            "junction": {id: junction for id, junction in junctions.items() if junction},
        }

    def _encoded(self, batch: Batch | None) -> Json:
        """Return the tokens that a step encodes, and the encoder's cache, if there is one."""
        encoder = self._scheduler.encoder
        if encoder is None:
            return {}
        return {
            "num_encoded": 0 if batch is None else batch.num_encoder_tokens,
            "encoder_cache": {"users": encoder.users, "freeable": encoder.freeable, "free": encoder.num_free},
        }

    def _copies(self, offload: Offload, entry: Scheduled) -> Json:
        """Return a step's copies to and from host memory; chunks are identified by vLLM's slots."""
        work = offload.take_work()
        # vLLM may name a copy again, until it hears that it has ended; it has been flushed once.
        flushed = {copy.number for copy in work.flushed}
        if "flushed" in entry.facts:
            flushed |= entry.facts["flushed"] & self._flushed
            self._flushed |= flushed
        facts: Json = {"host_loads": {}, "host_stores": {}, "flushed": flushed}
        for copy in work.stores:
            assert isinstance(copy, SequenceCopy)
            _, slots = entry.facts["host_stores"].get(copy.number, (None, []))
            names = self._chunk_names(offload, copy)
            self._in_slots |= dict(zip(slots, names, strict=False))
            facts["host_stores"][copy.number] = [copy.sequence.id, slots if len(slots) == len(names) else names]
        for copy in work.loads:
            assert isinstance(copy, SequenceCopy)
            sequence, names = copy.sequence, self._chunk_names(offload, copy)
            slots = entry.facts["host_loads"].get(copy.number, [[], False])[-2]
            self._lookups.append(Lookup(sequence, copy.num_local, copy.num_tokens))
            self._loaded.add(sequence)
            found = slots if [self._in_slots[slot] for slot in slots] == names else names
            facts["host_loads"][copy.number] = [
                sequence.id, copy.num_local, copy.num_tokens, found, copy.is_within_step
            ]  # fmt: skip
        return facts | {"free_host_chunks": offload.host.num_chunks - offload.host.num_used}

    def _chunk_names(self, offload: Offload, copy: SequenceCopy) -> list[Hashable]:
        chain = copy.sequence.chain
        return [offload.host.name(chain, chunk) for start, stop in copy.ranges for chunk in range(start, stop)]

    def _transfers(self, started: list[Sequence]) -> Json:
        """Return what vLLM's scheduler reports to its workers about transfers with a step, and clear it."""
        scheduler, size = self._scheduler, self._block_size
        facts: Json = {"loads": {}}
        for sequence in scheduler.outbox.take_loads():
            hits = sequence.cached_tokens
            facts["loads"][sequence.id] = [hits, sequence.num_known - hits, sequence.num_blocks - hits // size]
            self._lookups.append(Lookup(sequence, hits, sequence.num_known - hits))
            self._loaded.add(sequence)
        facts["unread"] = {sequence.id for sequence in self._aborted if sequence.is_remote_prefill}
        facts["not_processed"] = {sequence.id for sequence in self._aborted if sequence.is_remote_decode}
        facts["in_batch"] = {sequence.id for sequence in started if sequence.is_remote_decode}
        facts["send"] = {sequence.id for sequence in self._handed_over}
        self._aborted, self._handed_over = [], []
        return facts

    def _update(self, batch: Batch | None, entry: Updated) -> Json:
        facts: Json = {"sampled": {}, "finished": {}, "wasted": {}}
        if batch is not None:
            made = {one: 1 + entry.accepted.get(str(one.id), 0) for one in (*batch.decodes, *batch.sampled)}
            speaking = [sequence for sequence in batch.decodes if self._scheduler.is_delivered(sequence)]
            self._drafter.entry = entry
            sampled, finished = self._scheduler.update(batch)
            counts = dict.fromkeys((*speaking, *sampled), 1) | dict(batch.emitted if self._scheduler.is_counted else ())
            facts["sampled"] = {sequence.id: count for sequence, count in counts.items()}
            wasted = {one.id: count - counts.get(one, 0) for one, count in made.items()}
            facts["wasted"] = {id: count for id, count in wasted.items() if count}
            facts["finished"] = {sequence.id: sequence.finish_reason for sequence in finished}
        held = [s for s in self._scheduler.retention.kept if s.is_remote_decode and facts["finished"].get(s.id)]
        facts["handed_over"] = {sequence.id: [sequence.num_blocks, sequence.cached_tokens] for sequence in held}
        self._handed_over += held
        for id, num_valid in entry.arrivals:
            sequence = self._sequences[id]
            if self._scheduler.end_load(sequence, num_valid):
                facts["finished"][id] = sequence.finish_reason
            if num_valid == 0:
                self._loaded.discard(sequence)
        for number in entry.copies:
            self._scheduler.offload.end_copy(number)
        host = self._scheduler.offload.host
        facts["free_host_chunks"] = host.num_chunks - host.num_used
        for id in entry.sent:
            self._scheduler.retention.release(self._sequences[id])
        return facts | self._count_hits() | self._state()

    def _state(self) -> Json:
        scheduler = self._scheduler
        running, waiting = ([sequence.id for sequence in queue] for queue in (scheduler.running, scheduler.queued()))
        free = scheduler.pool.num_free
        holding, loading = scheduler.holding, [s for s in scheduler.holding if s.state == LOADING]
        come = [sequence for sequence in holding if sequence.state != LOADING and sequence.num_blocks]
        to_load = sum(sequence.is_remote_prefill for sequence in scheduler.queued())
        return {
            "running": running,
            "waiting": waiting,
            "num_waiting": len(waiting) + len(holding),
            "free_blocks": free,
            "kv_holding": [sequence.id for sequence in holding],
            "loading": [sequence.id for sequence in holding if sequence.state in (LOADING, LOADED)],
            "fetch": [to_load, len(loading), len(come)],
            "reserved_blocks": scheduler.num_reserved_blocks(),
            "held": {sequence.id for sequence in scheduler.retention.kept},
            "fenced_blocks": [sequence.num_blocks for _, sequence in scheduler.retention.fenced],
        }

    def _count_hits(self) -> Json:
        """Count the lookups since the last step ended like vLLM: at admission, and separately for resumed requests."""
        here, elsewhere = dict.fromkeys(CACHE_STATS, 0), dict.fromkeys(CACHE_STATS, 0)
        for lookup in self._lookups:
            for stats, queries, hits in (
                (here, lookup.num_known, lookup.num_hits),
                (elsewhere, lookup.num_known - lookup.num_hits, lookup.num_hits_elsewhere),
            ):
                stats[f"{lookup.prefix}requests"] += 1
                stats[f"{lookup.prefix}queries"] += queries
                stats[f"{lookup.prefix}hits"] += hits
        self._lookups = []
        if not self._scheduler.config.enable_prefix_caching:
            here = dict.fromkeys(CACHE_STATS, 0)
        return {"prefix_cache_stats": here, "connector_prefix_cache_stats": elsewhere}

    def _compare_events(self, entry: Updated) -> Json | None:
        pool = self._scheduler.pool
        names_groups = any(" of group " in kind for kind, _ in entry.events)
        ours, pool.events = list(_event_rows(pool.events, names_groups=names_groups)), []
        if [(kind, len(keys)) for kind, keys in ours] != [(kind, len(keys)) for kind, keys in entry.events]:
            return _difference(entry.number, "events", entry.events, ours)
        for (kind, keys), (_, hashes) in zip(ours, entry.events, strict=True):
            for name, recorded in zip(keys, hashes, strict=True):
                if self._names.setdefault(recorded, name) != name:
                    return _difference(entry.number, f"content of {kind} blocks", recorded, name)
        return self._compare_host_events(entry)

    def _compare_host_events(self, entry: Updated) -> Json | None:
        """Compare the events of host memory: stored chunks in any order, evicted ones in vLLM's order."""
        offload = self._scheduler.offload
        ours, offload.host.events = offload.host.events, []
        stored = {name for event in ours if isinstance(event, TierStored) for name in event.names()}
        removed = [name for event in ours if isinstance(event, TierRemoved) for name in event.names()]
        theirs = {hash for kind, hashes in entry.host_events if kind == "stored" for hash in hashes[-1:]}
        self._host_hashes |= theirs
        gone = [h for kind, hashes in entry.host_events if kind == "removed" for h in hashes if h in self._host_hashes]
        if {self._names.get(hash) for hash in theirs} != stored:
            return _difference(entry.number, "chunks stored on the host", theirs, stored)
        if [self._names.get(hash) for hash in gone] != removed:
            return _difference(entry.number, "chunks evicted from the host", gone, removed)
        return None


def _first_difference(entry: Scheduled | Updated, ours: Json) -> Json | None:
    """Return the first recorded fact that differs from ours; the order of scheduled requests counts."""
    for key, expected in entry.facts.items():
        if ours[key] != expected or (key == "scheduled" and list(ours[key]) != list(expected)):
            return _difference(entry.number, key, expected, ours[key])
    return None


def _difference(step: int | None, what: str, expected: object, got: object) -> Json:
    return {"step": step, "what": what, "vllm": expected, "mocker": got}


def step_times(recording: Recording, timing: TimingConfig) -> list[tuple[bool, float, float]]:
    """Replay a recording with another engine's step times.

    Returns:
        for each timed step: whether it had prefill, its recorded time, and its simulated time (s).

    Raises:
        RecordingError: no step was timed.
    """
    for what, is_so in (
        ("speculation", recording.config.num_speculative_tokens > 0),
        ("several pipeline stages", recording.num_stages > 1),
        ("groups of layers", recording.layout is not None),
    ):
        if is_so:
            raise RecordingError(
                f"{recording.path}: it has {what}, with which times are not compared; expected a recording without"
            )
    # Timed steps never overlapped when they were recorded, even if scheduling was asynchronous.
    simulated = resolve(replace(recording.config, async_scheduling=False), timing)
    scheduler = VllmCore(recording.config, simulated.num_blocks, max_loras=recording.max_loras)
    sequences: dict[str, Sequence] = {}
    in_flight, found = deque[tuple[Batch | None, float]](), []
    for entry in recording.entries:
        if isinstance(entry, Action):
            _act(scheduler, sequences, entry, recording.config.block_size)
        elif isinstance(entry, Scheduled):
            batch = scheduler.schedule()
            expected_s = 0.0 if batch is None else _duration(simulated.timing, batch, scheduler.iteration - 1)
            in_flight.append((batch, expected_s))
        else:
            batch, expected_s = in_flight.popleft()
            if batch is None:
                continue
            if entry.duration_s is not None and not batch.is_empty:
                found.append((bool(batch.chunks), entry.duration_s, expected_s))
            scheduler.update(batch)
    if not found:
        raise RecordingError(
            f"{recording.path}: contains no times; record it again with `dynabench record`, which includes them"
        )
    return found


def _duration(timing: TimingModel, batch: Batch, iteration: int) -> float:
    """Return the time of a scheduled batch in an iteration; a batch of decodes covers several iterations in a row."""
    num_decodes = len(batch.decodes)
    num_kv_tokens = batch.num_kv_tokens + num_decodes * (iteration - batch.iteration)
    if batch.is_empty:
        return 0.0
    if not batch.chunks:
        return timing.decode(num_decodes, num_kv_tokens).first
    parts = [chunk(count, sequence.num_computed - count) for sequence, count in batch.chunks]
    return timing.mixed(Prefill(*map(sum, zip(*parts, strict=True))), num_decodes, num_kv_tokens)


def _act(scheduler: VllmCore, sequences: dict[str, Sequence], action: Action, block_size: int) -> bool | None:
    """Repeat a call of vLLM's scheduler; for a reset, return whether it was carried out."""
    if action.kind == "add":
        if action.id in sequences:
            raise ValueError(f"request {action.id!r} is added twice")
        sequences[action.id] = sequence = _sequence(
            action, block_size, len(sequences), num_ahead=scheduler.num_named_ahead
        )
        scheduler.add(sequence)
    elif action.kind == "abort":
        scheduler.abort(sequences[action.id])
    else:
        return scheduler.reset_prefix_cache()
    return None


def content_ids(
    tokens: list[int],
    block_size: int,
    salt: str | None = None,
    adapter: str = "",
    *,
    num_ahead: int = 0,
    media: tuple[MediaItem, ...] = (),
) -> list[Hashable]:
    """Name each full block of a token sequence by its content and everything before it, and by the adapter that computes it.

    A name may include so many tokens after the block, without which it has none. The tokens of media are the same whatever
    these show, so their ids are part of the content, and where in the block they begin.
    """
    ids: list[Hashable] = []
    parent: Hashable = ("salt", salt, adapter)
    for start in range(0, len(tokens) - block_size - num_ahead + 1, block_size):
        stop = start + block_size + num_ahead
        shown = tuple([(item.id, item.offset - start) for item in media if item.end > start and item.offset < stop])
        parent = hash((parent, tuple(tokens[start:stop]), shown) if shown else (parent, tuple(tokens[start:stop])))
        ids.append(parent)
    return ids


def _sequence(action: Action, block_size: int, order: int, *, num_ahead: int) -> Sequence:
    stop = next((place for place, token in enumerate(action.output) if token in action.stops), None)
    return Sequence(
        action.id,
        num_prompt=len(action.prompt),
        max_tokens=action.max_tokens,
        stop_after=None if stop is None else stop + 1,
        chain=BlockChain(
            content_ids(
                action.prompt + action.output,
                block_size,
                action.salt,
                action.adapter,
                num_ahead=num_ahead,
                media=action.media,
            )
        ),
        media=action.media,
        is_remote_prefill=action.remote == "decode",
        is_remote_decode=action.remote == "prefill",
        priority=action.priority,
        adapter=action.adapter,
        arrival=order,
    )


def _event_rows(events: Iterable[BlockEvent], *, names_groups: bool) -> Iterator[tuple[str, list[Hashable]]]:
    for event in events:
        if isinstance(event, AllBlocksCleared):
            yield "cleared", []
            continue
        of_group = ""
        if names_groups and isinstance(event, (GroupStored, GroupRemoved)):
            of_group = f" of group {event.group.number}"
        if isinstance(event, (BlockStored, GroupStored)):
            yield f"stored{of_group}", event.keys()
        else:
            for key in event.keys():  # noqa: SIM118 (an event, not a dict)
                yield f"removed{of_group}", [key]
