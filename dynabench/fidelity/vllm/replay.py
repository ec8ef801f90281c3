"""Replay a recording of a real scheduler through the mocker's, and show the first difference."""

from collections import deque
from collections.abc import Hashable

from dynabench.fidelity.recordings import MALFORMED, Json, RecordingError, Verdict, why_unreadable
from dynabench.fidelity.vllm.entries import OF_GROUP, Action, Ended, Entry, Event, Recording, Scheduled, Updated
from dynabench.fidelity.vllm.kv_events import EventFields
from dynabench.fidelity.vllm.sequences import act
from dynabench.fidelity.vllm.traces import CACHE_STATS
from foundation.text import one_line
from mocker import Sequence
from mocker.batch import Batch
from mocker.events import TierRemoved, TierStored
from mocker.sequence import LOADED, LOADING, RUNNING
from mocker.speculation.drafter import Drafter
from mocker.tiers.copies import SequenceCopy
from mocker.vllm.core import VllmCore
from mocker.vllm.groups.blocks import GroupedBlocks
from mocker.vllm.offload.offload import Offload

ABORTED = "FINISHED_ABORTED"
STATUSES = {"length": "FINISHED_LENGTH_CAPPED", "stop": "FINISHED_STOPPED", "error": "FINISHED_ERROR"}
"""How vLLM calls the states of requests that have ended."""


def verify(recording: Recording, *, is_counted: bool = False) -> Verdict:
    """Replay a recording step by step and stop at the first difference.

    Args:
        recording: what vLLM did.
        is_counted: count tokens in each iteration, even where they have a closed form (see `VllmCore`).

    Raises:
        RecordingError: it cannot be replayed: requests or steps are missing.
    """
    num_steps = num_events = 0
    unseen = tuple(recording.not_compared)
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
            return Verdict(recording.path, "vllm", recording.version, num_steps, num_events, difference, unseen)
        num_steps += isinstance(entry, Scheduled)
        num_events += len(entry.events) if isinstance(entry, Updated) else 0
    if replay.num_unfinished:
        raise RecordingError(
            f"{recording.path}: ends after {num_steps} steps, but {replay.num_unfinished} of its requests are "
            "unfinished"
        )
    return Verdict(recording.path, "vllm", recording.version, num_steps, num_events, None, unseen)


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
            drafter=self._drafter,
            num_stages=recording.num_stages,
            is_counted=is_counted,
        )
        self._sequences: dict[str, Sequence] = {}
        self._in_flight: deque[Batch | None] = deque()
        updates = [entry for entry in recording.entries if isinstance(entry, Updated)]
        names_groups = any(OF_GROUP in event.kind for entry in updates for event in entry.events)
        self._fields = EventFields(
            config.block_size, num_ahead=self._scheduler.num_named_ahead, names_groups=names_groups
        )
        self._contents: dict[int, Hashable] = {}  # vLLM's number of a block -> our name of what was last in it
        self._untold: set[Hashable] = set()  # our names of blocks that a step may have given and taken away again
        self._ended: list[Sequence] = []  # since the last step was scheduled
        self._statuses: dict[str, str] = {}  # of requests that have ended, in vLLM's words
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

    def compare(self, entry: Entry) -> Json | None:
        """Repeat a recorded call, and return the first difference in its result."""
        if isinstance(entry, Action):
            if entry.kind == "abort" and not (sequence := self._sequences[entry.id]).is_over:
                self._aborted.append(sequence)
                self._ended.append(sequence)
                self._statuses[entry.id] = ABORTED
            facts = {"was": _status(self._sequences[entry.id])} if entry.kind == "abort" else {}
            is_done = act(self._scheduler, self._sequences, entry, self._block_size)
            if is_done is not entry.is_done:
                return _difference(None, "reset", entry.is_done, is_done)
            return self._compare_added(entry) if entry.kind == "add" else _first_difference(None, entry.facts, facts)
        if isinstance(entry, Ended):
            return _first_difference(None, entry.facts, self._end(entry))
        if isinstance(entry, Scheduled):
            self._scheduler.offload.ended.sort(key=lambda end: [*entry.ended, end[0].id].index(end[0].id))
            return _first_difference(entry.number, entry.facts, self._schedule(entry))
        if not self._in_flight:
            raise ValueError(f"step {entry.number} ends but was never scheduled")
        in_flight = self._in_flight.popleft()
        return _first_difference(entry.number, entry.facts, self._update(in_flight, entry)) or self._compare_events(
            entry
        )

    def _compare_added(self, action: Action) -> Json | None:
        """Compare how many blocks of a prompt have names, and which they are."""
        sequence, ahead = self._sequences[action.id], self._scheduler.num_named_ahead
        can_be_found = self._scheduler.config.enable_prefix_caching
        count = (sequence.num_prompt - ahead) // self._block_size if can_be_found else 0
        facts = {"prompt_len": sequence.num_prompt, "num_hashes": count}
        for place, hash in action.hashes.items():
            if self._names.setdefault(hash, name := sequence.chain.key(place)) != name:
                return _difference(None, f"name of block {place} of {action.id}", hash, name)
        return _first_difference(None, action.facts, facts)

    def _schedule(self, entry: Scheduled) -> Json:
        scheduler = self._scheduler
        batch = scheduler.schedule()
        self._in_flight.append(batch)
        facts: Json = {"scheduled": {}, "drafts": {}, "new": {}, "resumed": [], "preempted": [], "cached": {}}
        facts["ended"], self._ended = {sequence.id for sequence in self._ended}, []
        if batch is not None:
            facts["scheduled"] = {sequence.id: count for sequence, count in scheduler.num_new_tokens(batch)}
            if scheduler.is_counted:
                facts["drafts"] = {sequence.id: count for sequence, count in batch.drafts.items()}
            counts = dict(batch.chunks)
            facts["new"] = {sequence.id: sequence.num_computed - counts[sequence] for sequence in batch.admitted}
            facts["resumed"] = [sequence.id for sequence in batch.resumed]
            facts["preempted"] = sorted(sequence.id for sequence in batch.preempted)
            facts["cached"] = self._known_before(entry, facts)
            self._untold = self._taken_back(batch)
        facts["total"] = sum(facts["scheduled"].values())
        facts |= self._tables(facts["scheduled"]) | self._encoded(batch)
        started = [] if batch is None else [*batch.admitted, *batch.resumed]
        copies = self._copies(scheduler.offload, entry)
        for sequence in started:
            hits = sequence.num_computed - counts[sequence]
            if sequence not in self._loaded or not hits:  # else it was counted when its load began
                self._lookups.append(Lookup(sequence, hits))
            self._loaded.discard(sequence)
        for id, (before, blocks) in entry.tables.items():
            chain = self._sequences[id].chain
            self._contents |= {block: chain.key(before + place) for place, block in enumerate(blocks)}
        facts |= self._transfers(started) | self._state(entry)
        return facts | copies

    def _taken_back(self, batch: Batch) -> set[Hashable]:
        """Name the blocks of requests that a step may have preempted after it gave them some: by priority.

        vLLM does not say which blocks these were; they are in the free queue.
        """
        if self._scheduler.config.scheduling_policy != "priority":
            return set()
        size = self._block_size
        return {one.chain.key(place) for one in batch.preempted for place in range(one.num_known // size)}

    def _known_before(self, entry: Scheduled, facts: Json) -> Json:
        """Return what a step's requests that vLLM's workers know already had before it: computed and output tokens.

        Output tokens are those that are known, and those in flight.
        """
        iteration, found = self._scheduler.iteration, {}
        # The second model runner forgets what is preempted: what resumes is new to it.
        new = {*facts["new"], *(id for id in facts["resumed"] if id not in entry.facts.get("cached", ()))}
        for id, count in facts["scheduled"].items():
            if id not in new:
                sequence = self._sequences[id]
                computed = sequence.computed(iteration) - count
                found[id] = [computed, max(sequence.num_known, computed + 1) - sequence.num_prompt]
        return found

    def _encoded(self, batch: Batch | None) -> Json:
        """Return the tokens that a step encodes, and the encoder's cache, if there is one."""
        encoder = self._scheduler.encoder
        if encoder is None:
            return {}
        return {
            "num_encoded": 0 if batch is None else batch.num_encoder_tokens,
            "encoder_cache": {"users": encoder.users, "freeable": encoder.freeable, "free": encoder.num_free},
        }

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
        self._note_ends(facts)
        return facts | self._count_hits() | self._state(entry)

    def _note_ends(self, facts: Json) -> None:
        """Note which requests a step ended, and what ended them if that was a token."""
        facts["stop_reason"] = {}
        for id, reason in facts["finished"].items():
            sequence = self._sequences[id]
            self._ended.append(sequence)
            self._statuses[id] = STATUSES[reason]
            action = sequence.chain.payload
            assert isinstance(action, Action)
            last = action.output[sequence.num_total - sequence.num_prompt - 1] if reason == "stop" else None
            if last is not None and last != action.end_token:
                facts["stop_reason"][id] = last

    def _end(self, entry: Ended) -> Json:
        status = self._statuses.get(entry.id, "not over")
        return {"num_preemptions": self._sequences[entry.id].num_preemptions, "status": status}

    def _free_queue(self, recorded: list[int]) -> list[Hashable]:
        """Return the free queue: vLLM's numbers if our blocks are the same ones, or have the same content, in this order."""
        ours = self._scheduler.pool.queue()
        if isinstance(self._scheduler.blocks, GroupedBlocks):
            return ours
        num_blank = self._scheduler.pool.num_blank
        self._contents |= {block: name for block, name in zip(recorded, ours, strict=False) if name in self._untold}
        theirs = [None] * num_blank + [self._contents.get(block) for block in recorded[num_blank:]]
        return list(recorded) if theirs == ours else ours

    def _state(self, entry: Scheduled | Updated) -> Json:
        scheduler = self._scheduler
        running, waiting = ([sequence.id for sequence in queue] for queue in (scheduler.running, scheduler.queued()))
        free = scheduler.pool.num_free
        holding, loading = scheduler.holding, [s for s in scheduler.holding if s.state == LOADING]
        come = [sequence for sequence in holding if sequence.state != LOADING and sequence.num_blocks]
        to_load = sum(sequence.is_remote_prefill for sequence in scheduler.queued())
        queue = {"free_queue": self._free_queue(entry.facts["free_queue"])} if "free_queue" in entry.facts else {}
        return queue | {
            "running": running,
            "waiting": waiting,
            "num_waiting": len(waiting) + len(holding),
            "free_blocks": free,
            "usage": round(1 - free / scheduler.pool.num_blocks, 6),
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
        ours, pool.events = list(self._fields.rows(pool.events)), []
        shapes = [[(event.kind, len(event.hashes)) for event in events] for events in (ours, entry.events)]
        if shapes[0] != shapes[1]:
            return _difference(entry.number, "events", entry.events, ours)
        for event, recorded in zip(ours, entry.events, strict=True):
            for name, hash in zip(event.hashes, recorded.hashes, strict=True):
                if self._names.setdefault(hash, name) != name:
                    return _difference(entry.number, f"content of {event.kind} blocks", hash, name)
            if (difference := self._compare_fields(entry.number, event, recorded)) is not None:
                return difference
        return self._compare_host_events(entry)

    def _compare_fields(self, step: int, ours: Event, recorded: Event) -> Json | None:
        """Compare what events say beside which blocks they are of."""
        for key, theirs in recorded.facts.items():
            expected = theirs
            if key == "parent_block_hash" and theirs is not None:
                # The parent need not have been stored: it may be masked.
                expected = self._names.setdefault(theirs, ours.facts[key])
            if ours.facts[key] != expected:
                return _difference(step, f"{key} of {ours.kind} blocks", theirs, ours.facts[key])
        return None

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


def _status(sequence: Sequence) -> str | None:
    """Return what vLLM calls the state of a request; it forgets those that are over."""
    if sequence.is_over:
        return None
    if sequence.state in (LOADING, LOADED):
        return "WAITING_FOR_REMOTE_KVS"
    if sequence.state == RUNNING:
        return "RUNNING"
    return "PREEMPTED" if sequence.num_preemptions else "WAITING"


def _first_difference(step: int | None, facts: Json, ours: Json) -> Json | None:
    """Return the first recorded fact that differs from ours; the order of scheduled requests counts."""
    for key, expected in facts.items():
        if ours[key] != expected or (key in ("scheduled", "cached") and list(ours[key]) != list(expected)):
            return _difference(step, key, expected, ours[key])
    return None


def _difference(step: int | None, what: str, expected: object, got: object) -> Json:
    return {"step": step, "what": what, "vllm": expected, "mocker": got}
