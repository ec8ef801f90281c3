"""The mocker as a live engine: the simulated engine core, driven by a loop that sleeps its step durations.

Its tokens are lower-case letters, a pure function of the prompt, so that text, tokens and hashes agree.
"""

import asyncio
import random
from collections.abc import Callable, Iterable
from typing import Any

import msgspec
import numpy as np
from xxhash import xxh3_64_intdigest

from mocker import AllBlocksCleared, BlockChain, BlockStored, Engine, EngineConfig, Sequence
from mocker.events import KvEvent
from serving.router.hashing import block_hashes, sequence_hashes
from serving.wire import Finished, Generate, Removed, StepFrame, Stored

LETTERS = np.frombuffer(b"abcdefghijklmnopqrstuvwxyz     ", np.uint8).astype(np.uint32)


class _Live:
    """A request in the engine: its output, known from the start, and how much of it was sent."""

    __slots__ = ("output", "sent")

    def __init__(self, output: list[int]) -> None:
        self.output = output
        self.sent = 0


class MockEngine:
    """Runs one simulated engine in real time and hands each step's frame to `publish`."""

    def __init__(self, settings: dict[str, Any], publish: Callable[[StepFrame], None], *, kv_events: bool) -> None:
        """Build it from `EngineConfig` fields.

        Raises:
            ValueError: a setting is wrong.
        """
        self.config = msgspec.convert(settings, EngineConfig)
        self.engine = Engine(self.config, kv_events=kv_events)
        self._publish = publish
        self._sequences: dict[int, Sequence] = {}
        self._bell = asyncio.Event()
        self._order = 0

    def generate(self, request: Generate) -> None:
        """Queue a request; a request that can never fit is answered with an error at once."""
        size = self.config.block_size
        prompt = np.frombuffer(request.token_ids, "<u4")
        output = self._output(request)
        named = len(request.sequence_hashes)
        tail = np.concatenate([prompt[named * size :], np.array(output, np.uint32)])
        parent = request.sequence_hashes[-1] if named else None
        ids = request.sequence_hashes + sequence_hashes(block_hashes(tail, size), parent)
        self._order += 1
        sequence = Sequence(
            request.id,
            num_prompt=len(prompt),
            max_tokens=request.max_tokens,
            chain=BlockChain(ids),
            arrival=float(self._order),
            payload=_Live(output),
        )
        try:
            self.engine.add(sequence)
        except ValueError as error:
            self._publish(StepFrame([], [], [Finished(request.id, "error", error=str(error))], []))
            return
        self._sequences[request.id] = sequence
        self._bell.set()

    def cancel(self, id: int) -> None:
        """Abort a request; unknown ones are ignored."""
        sequence = self._sequences.pop(id, None)
        if sequence is not None:
            self.engine.abort(sequence)

    async def run(self, ready: Callable[[], Any]) -> None:
        """Step for ever; `ready` is awaited after each frame, for back-pressure."""
        loop, engine = asyncio.get_running_loop(), self.engine
        now = loop.time()
        while True:
            step = engine.schedule(now)
            if step is None:
                self._bell.clear()
                await self._bell.wait()
                now = loop.time()
                continue
            # Deadlines are absolute: a late timer delays one step, not all that follow.
            await asyncio.sleep(max(step.end - loop.time(), 0))
            self._send(engine)
            now = step.end
            await ready()

    def _send(self, engine: Engine) -> None:
        batch = engine.step.batch if engine.step else None
        assert batch is not None
        granted = [sequence for sequence, _ in engine.num_new_tokens() if sequence.decoding]
        output = engine.complete()
        ids: list[int] = []
        tokens: list[int] = []
        for sequence in (*granted, *output.sampled):
            live = sequence.payload
            assert isinstance(live, _Live)
            if sequence.id in self._sequences:
                assert isinstance(sequence.id, int)
                ids.append(sequence.id)
                tokens.append(live.output[live.sent])
                live.sent += 1
        finished = [
            Finished(sequence.id, "length", sequence.cached_tokens)
            for sequence in output.finished
            if isinstance(sequence.id, int) and self._sequences.pop(sequence.id, None) is not None
        ]
        events = engine.take_events()
        if ids or finished or events:
            self._publish(StepFrame(ids, tokens, finished, list(_translate(events))))

    def _output(self, request: Generate) -> list[int]:
        seed = request.sequence_hashes[-1] if request.sequence_hashes else xxh3_64_intdigest(request.token_ids)
        start = random.Random(seed).randrange(1 << 20)
        places = (
            np.arange(request.max_tokens, dtype=np.uint64) * np.uint64(2654435761) + np.uint64(start)
        ) >> np.uint64(7)
        output: list[int] = LETTERS[(places % np.uint64(len(LETTERS))).astype(np.int64)].tolist()
        return output


def _translate(events: Iterable[KvEvent]) -> Iterable[Stored | Removed]:
    """Turn the engine's events into the router's: sequence hashes, each with its parent."""
    for event in events:
        if isinstance(event, BlockStored):
            parent = event.chain.ids[event.start - 1] if event.start else None
            assert parent is None or isinstance(parent, int)
            yield Stored(_hashes(event.keys()), parent)
        elif not isinstance(event, AllBlocksCleared):
            yield Removed(_hashes(event.keys()))


def _hashes(keys: Iterable[Any]) -> list[int]:
    return [key for key in keys if isinstance(key, int)]
