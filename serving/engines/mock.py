"""The mocker as a live engine: the simulated engine core, driven by a loop that sleeps its step durations.

Token `i` of an answer is a pure function of (prompt, seed, i), so that an answer which moved from one worker to another
can be checked token by token.
"""

import asyncio
from collections.abc import Iterable
from collections.abc import Sequence as Several
from time import monotonic
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, EngineConfig, Sequence
from mocker.events import KvEvent
from mocker.timing.choose import SimulatedEngine, resolve
from mocker.timing.config import TimingConfig, divide
from serving.engines.timer import StepTimer
from serving.model.files import BYTES_CONTEXT, ModelFiles
from serving.model.tokenizer import load
from serving.router.events import BlocksCleared, BlocksEvent, BlocksRemoved, BlocksStored
from serving.router.hashing import block_hashes, sequence_hashes
from serving.runtime.server import Stream
from serving.worker.config import WorkerConfig
from serving.worker.engine import EngineCall, EngineLoad, EngineTraits
from serving.worker.kv_events import KvEventPublisher
from serving.worker.protocol import PreprocessedRequest

LETTERS: npt.NDArray[np.uint32] = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8).astype(np.uint32)
"""What the mocker says where tokens are bytes."""

MAX_WAITING = 4096
"""Requests waiting for a place in the batch beyond which an engine refuses more."""

__all__ = ["EngineConfig", "MockEngine", "Mocker", "TimingConfig", "divide"]


def answer_tokens(
    prompt: npt.NDArray[np.uint32], seed: int, start: int, count: int, vocabulary: npt.NDArray[np.uint32]
) -> list[int]:
    """Return tokens `start` to `start + count` of the mocker's answer to a prompt: a pure function of its arguments."""
    base = np.uint64(xxh3_64_intdigest(prompt.tobytes(), seed & 0xFFFF_FFFF_FFFF_FFFF))
    with np.errstate(over="ignore"):  # splitmix64
        x = base + np.arange(start + 1, start + count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    places = (x ^ (x >> np.uint64(31))) % np.uint64(len(vocabulary))
    tokens: list[int] = vocabulary[places].tolist()
    return tokens


def answer_length(prompt: npt.NDArray[np.uint32], seed: int) -> int:
    """Return how long the mocker's answer is where the request does not say: 16 to 271 tokens."""
    return 16 + xxh3_64_intdigest(prompt.tobytes(), (seed + 1) & 0xFFFF_FFFF_FFFF_FFFF) % 256


def eos_place(request: PreprocessedRequest, prompt: npt.NDArray[np.uint32], seed: int) -> int | None:
    """Return as which token the mocker says EOS, from 1: where the request asks for it, or names no limit."""
    conditions = request.stop_conditions
    if conditions.ignore_eos:
        return None
    if conditions.stop_after is not None:
        return max(conditions.stop_after, conditions.min_tokens)
    if conditions.is_default_limit:
        return max(answer_length(prompt, seed) - request.num_generated, conditions.min_tokens, 1)
    return None


def stop_place(request: PreprocessedRequest, output: list[int]) -> int | None:
    """Return as which token of its answer, from 1, a request's first stop token comes that is not within `min_tokens`."""
    conditions = request.stop_conditions
    stops = {*conditions.stop_token_ids, *(() if conditions.ignore_eos else request.eos_token_ids)}
    if stops.isdisjoint(output):
        return None
    places = (place for place, token in enumerate(output, 1) if token in stops and place > conditions.min_tokens)
    return next(places, None)


def log_probability(token: int) -> float:
    """Return the mocker's log-probability of a token, -0.6 to -4.6: a function of the token alone."""
    return -0.6 - (token * 2_654_435_761 >> 8) % 4001 / 1000


class LogProbabilities:
    """Made-up log-probabilities, in the form in which engines give real ones."""

    def __init__(self, words: list[int], sampling: dict[str, Any]) -> None:
        self._words = words
        self.num_output: int | None = sampling.get("logprobs")
        self.num_prompt: int | None = sampling.get("prompt_logprobs")

    @classmethod
    def wanted(cls, words: list[int], sampling: dict[str, Any]) -> "LogProbabilities | None":
        """Return those that a request asks for, None if it asks for none."""
        return cls(words, sampling) if "logprobs" in sampling or "prompt_logprobs" in sampling else None

    def of_output(self, tokens: list[int]) -> dict[str, Any]:
        """Return those of generated tokens."""
        if self.num_output is None:
            return {}
        tops = [self._top(token, self.num_output) for token in tokens]
        return {"log_probs": [log_probability(token) for token in tokens], "top_logprobs": tops}

    def of_prompt(self, tokens: list[int]) -> dict[str, Any]:
        """Return those of the prompt's tokens; the first follows nothing and has none."""
        if self.num_prompt is None:
            return {}
        tops = [self._top(token, self.num_prompt) for token in tokens[1:]]
        found = [log_probability(token) for token in tokens[1:]]
        return {"prompt_log_probs": [None, *found], "prompt_top_logprobs": [None, *tops]}

    def _top(self, token: int, count: int) -> list[tuple[int, float]]:
        """Return a token and others, each less likely than the one before."""
        words = self._words
        near = [words[(token + place) % len(words)] for place in range(min(count, len(words)))]
        others = [other for other in near if other != token]
        own = log_probability(token)
        return [(other, own - place) for place, other in enumerate([token, *others][:count])]


class _Live:
    """A request in the engine: its answer, known from the start, and how much of it was made and sent."""

    __slots__ = ("end", "log_probabilities", "made", "output", "prompt", "sent", "stream")

    def __init__(
        self,
        prompt: npt.NDArray[np.uint32],
        output: list[int],
        stream: Stream,
        log_probabilities: LogProbabilities | None,
    ) -> None:
        self.prompt = prompt
        self.output = output
        self.stream = stream
        self.log_probabilities = log_probabilities
        self.made = 0
        self.sent = 0
        self.end: dict[str, Any] | None = None

    def flush(self) -> None:
        """Send what was made and not sent, and the end, unless the reader is not ready."""
        stream = self.stream
        if stream.is_blocked or stream.is_over:
            return
        tokens = self.output[self.sent : self.made]
        logs, item = self.log_probabilities, {"token_ids": tokens}
        if logs is not None and tokens:
            item |= logs.of_output(tokens) | (logs.of_prompt(self.prompt.tolist()) if not self.sent else {})
        self.sent = self.made
        if self.end is not None:
            stream.send(item | self.end)
            stream.end()
        elif logs is not None and tokens:
            stream.send(item)
        elif tokens:
            stream.send(tokens)


class MockEngine:
    """Runs one simulated engine in real time."""

    def __init__(
        self,
        simulated: SimulatedEngine,
        *,
        publisher: KvEventPublisher | None = None,
        vocabulary: npt.NDArray[np.uint32] = LETTERS,
        max_waiting: int = MAX_WAITING,
    ) -> None:
        config = self.config = simulated.config
        self.engine = Engine(config, simulated.timing, num_blocks=simulated.num_blocks, kv_events=publisher is not None)
        self._publisher = publisher
        self._vocabulary = vocabulary
        self._words: list[int] = np.unique(vocabulary).tolist()
        self._max_waiting = max_waiting
        self._bell = asyncio.Event()
        self._order = 0

    def submit(self, request: PreprocessedRequest, stream: Stream) -> None:
        """Queue a request; one that can never fit, or that finds the queue full, is ended with an error at once."""
        if len(self.engine.scheduler.waiting) >= self._max_waiting:
            stream.end(f"{self._max_waiting} requests wait for this engine already", "overloaded")
            return
        size = self.config.block_size
        tokens = np.frombuffer(bytes(request.token_ids.data), "<u4")
        prompt = tokens[: len(tokens) - request.num_generated]
        seed = int(request.sampling_options.get("seed") or 0)
        limit = request.stop_conditions.max_tokens or self.config.max_model_len or len(tokens)
        stop_after = eos_place(request, prompt, seed)
        length = limit if stop_after is None else min(stop_after, limit)
        output = answer_tokens(prompt, seed, request.num_generated, length, self._vocabulary)
        stop_after = stop_place(request, output) or stop_after
        output = output[:stop_after]
        hashes = np.frombuffer(bytes(request.sequence_hashes.data), "<u8").tolist() if request.sequence_hashes else []
        tail = np.concatenate([tokens[len(hashes) * size :], np.array(output, np.uint32)])
        ids = hashes + sequence_hashes(block_hashes(tail, size), hashes[-1] if hashes else None)
        self._order += 1
        log_probabilities = LogProbabilities.wanted(self._words, request.sampling_options)
        live = _Live(tokens, output, stream, log_probabilities)
        sequence = Sequence(
            self._order,
            num_prompt=len(tokens),
            max_tokens=limit,
            stop_after=stop_after,
            chain=BlockChain(ids),
            arrival=float(self._order),
            payload=live,
        )
        try:
            self.engine.add(sequence)
        except ValueError as error:
            stream.end(str(error), "invalid")
            return
        stream.on_cancel = lambda: self.engine.abort(sequence)
        stream.on_unblocked = live.flush
        self._bell.set()

    def load(self) -> EngineLoad:
        """Tell what the engine is doing."""
        scheduler = self.engine.scheduler
        pool = scheduler.pool
        return EngineLoad(
            len(scheduler.running),
            len(scheduler.waiting),
            pool.num_blocks - pool.num_free,
            pool.num_blocks,
            self.config.max_num_seqs,
        )

    async def run(self) -> None:
        """Step forever."""
        engine, timer = self.engine, StepTimer()
        try:
            await self._step(engine, timer)
        finally:
            timer.close()

    async def _step(self, engine: Engine, timer: StepTimer) -> None:
        now = monotonic()  # uvloop's own clock counts milliseconds
        while True:
            step = engine.schedule(now)
            if step is None:
                self._bell.clear()
                await self._bell.wait()
                now = monotonic()
                continue
            # Deadlines are absolute: a late timer delays one step, not all that follow.
            await timer.until(step.end)
            self._send(engine)
            now = step.end

    def _send(self, engine: Engine) -> None:
        decoded = engine.decoded()
        output = engine.complete()
        for sequence in output.finished:
            live = sequence.payload
            assert isinstance(live, _Live)
            live.end = {"finish_reason": sequence.finish_reason, "cached_tokens": sequence.cached_tokens}
        for sequence in (*decoded, *output.sampled):
            live = sequence.payload
            assert isinstance(live, _Live)
            made = live.made = live.made + 1
            is_plain = live.end is None and live.log_probabilities is None
            if is_plain and live.sent == made - 1 and not live.stream.is_blocked:
                live.stream.send(live.output[live.sent])
                live.sent = made
            else:
                live.flush()
        if self._publisher is not None and engine.has_events:
            self._publisher.publish(list(_translate(engine.take_events())))


class Mocker:
    """The mocker as an engine (see `serving.worker.engine.Engine`): one simulated engine for each data-parallel rank."""

    def __init__(
        self,
        worker: WorkerConfig,
        config: EngineConfig,
        timing: TimingConfig = TimingConfig(),  # noqa: B008 (frozen)
    ) -> None:
        """Find the engine's step times and blocks; nothing runs yet.

        Raises:
            ValueError: they cannot be found.
        """
        self.calls = (EngineCall("mocker.Engine", {"config": config, "timing": timing}),)
        self._simulated = resolve(config, timing)
        limit = config.max_model_len or min(self._simulated.num_usable_tokens, BYTES_CONTEXT)
        self.traits = EngineTraits(
            block_size=config.block_size,
            context_length=config.max_model_len or (None if worker.model_path else limit),
            num_ranks=config.dp_size,
            has_kv_events=worker.kv_events and config.enable_prefix_caching,
        )
        self._vocabulary = LETTERS
        self._ranks: list[MockEngine] = []
        self._stepping: list[asyncio.Task[None]] = []
        self._decode = msgspec.msgpack.Decoder(PreprocessedRequest).decode

    async def start(self, files: ModelFiles) -> None:
        """See `Engine`."""
        self._vocabulary = (await asyncio.to_thread(load, files)).speakable()

    def publish_to(self, publishers: Several[KvEventPublisher]) -> None:
        """See `Engine`."""
        self._ranks = [
            MockEngine(
                self._simulated,
                publisher=publishers[rank] if publishers else None,
                vocabulary=np.asarray(self._vocabulary),
            )
            for rank in range(self.traits.num_ranks)
        ]
        self._stepping = [asyncio.create_task(each.run()) for each in self._ranks]

    def service(self, request: msgspec.Raw, stream: Stream) -> None:
        """See `Engine`."""
        asked = self._decode(request)
        if not 0 <= asked.dp_rank < len(self._ranks):
            stream.end(f"there is no rank {asked.dp_rank}; this worker has {len(self._ranks)}", "invalid")
            return
        self._ranks[asked.dp_rank].submit(asked, stream)

    def load(self, rank: int) -> EngineLoad:
        """See `Engine`."""
        return self._ranks[rank].load()

    async def failed(self) -> None:
        """See `Engine`."""
        done, _ = await asyncio.wait(self._stepping, return_when=asyncio.FIRST_COMPLETED)
        await done.pop()

    async def close(self) -> None:
        """See `Engine`."""
        for task in self._stepping:
            task.cancel()
        await asyncio.gather(*self._stepping, return_exceptions=True)


def _translate(events: Iterable[KvEvent]) -> Iterable[BlocksEvent]:
    """Turn the engine's events into the router's: sequence hashes, each with its parent."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.chain.ids[event.start - 1] if event.start else None
            assert parent is None or isinstance(parent, int)
            yield BlocksStored(_hashes(event.keys()), parent)
        elif isinstance(event, AllBlocksCleared):
            yield BlocksCleared()
        else:
            yield BlocksRemoved(_hashes(event.keys()))


def _hashes(keys: Iterable[Any]) -> list[int]:
    return [key for key in keys if isinstance(key, int)]
