"""What is asked of a rank of the mocker as a whole, between its steps: pauses, an empty cache, the end of requests.

Pauses have vLLM's modes:

    abort    requests in progress end, with what was generated so far
    wait     requests that run end by themselves; the others wait
    keep     nothing happens to any request until the engine resumes

Requests that come during a pause wait for its end.
"""

import asyncio
from typing import Literal

from serving.engines.mock.kv.handover import HandoverRank
from serving.engines.mock.live import Live
from serving.engines.mock.observer import RankWatch

PauseMode = Literal["abort", "wait", "keep"]


class Control:
    """See the module."""

    def __init__(self, rank: HandoverRank, watch: RankWatch | None = None) -> None:
        self._rank = rank
        self._watch = watch
        self._resets: list[tuple[bool, asyncio.Future[bool]]] = []
        self._quiet: list[asyncio.Future[None]] = []

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait for the end of a pause."""
        return self._rank.engine.pause_kind is not None

    async def pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        """Pause the rank, and wait until it does nothing any more.

        With `clears_cache`, its prefix cache is empty afterwards, and requests that were kept compute their KV again.

        Raises:
            RuntimeError: see `reset_prefix_cache`.
        """
        if mode == "abort":
            for live in self.lives():
                self.abort(live)
        self._rank.engine.pause("all" if mode == "keep" else "new")
        await self._until_quiet()
        if clears_cache:
            await self.reset_prefix_cache(preempts_running=True)

    def resume(self) -> None:
        """End a pause, if there is one."""
        self._rank.engine.resume()
        self._rank.wake()

    async def reset_prefix_cache(self, *, preempts_running: bool = False) -> bool:
        """Forget all cached blocks, once the step in flight has ended; return False if any is in use.

        Raises:
            RuntimeError: see `mocker.engine.Engine.reset_prefix_cache`.
        """
        done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._resets.append((preempts_running, done))
        if self._rank.engine.step is None:
            self.on_step_end()
        return await done

    def lives(self) -> list[Live]:
        """Return the requests that the engine has."""
        found = [each.payload for each in self._rank.engine.sequences()]
        return [live for live in found if isinstance(live, Live)]

    def abort(self, live: Live, *, is_asked: bool = False) -> None:
        """End a request with what was generated so far, and say so to its client, who may have asked for that."""
        self._give_up(live, is_asked=is_asked)
        live.abort()

    def fail(self, live: Live, reason: str) -> None:
        """End a request that can never start, and holds up all others."""
        self._give_up(live, is_asked=False)
        live.stream.end(reason, "engine")

    def _give_up(self, live: Live, *, is_asked: bool) -> None:
        self._rank.engine.abort(live.sequence)
        live.stream.on_cancel = None
        if self._watch is not None:
            self._watch.abort(live, is_asked=is_asked)
        self._rank.wake()

    def on_step_end(self) -> None:
        """Empty the cache, if that was asked for: no step is in flight."""
        if not self._resets:
            return
        resets, self._resets = self._resets, []
        for preempts_running, done in resets:
            try:
                is_reset = self._rank.engine.reset_prefix_cache(preempts_running=preempts_running)
            except RuntimeError as error:
                if not done.done():
                    done.set_exception(error)
            else:
                if not done.done():
                    done.set_result(is_reset)

    def on_idle(self) -> None:
        """Complete a pause, unless requests wait for KV that is on its way: they may run yet."""
        engine = self._rank.engine
        if engine.num_waiting > engine.num_queued and engine.pause_kind != "all":
            return
        quiet, self._quiet = self._quiet, []
        for done in quiet:
            if not done.done():
                done.set_result(None)

    async def _until_quiet(self) -> None:
        """Wait until no step is in flight and nothing can be scheduled."""
        done = asyncio.get_running_loop().create_future()
        self._quiet.append(done)
        self._rank.wake()
        await done
