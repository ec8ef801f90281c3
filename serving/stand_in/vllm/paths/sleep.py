"""Sleep and pauses.

    /sleep    pauses the engine; from level 1 on it also gives up its KV, and only /wake_up makes it work again
    /pause    pauses the engine until /resume or /wake_up

What is asleep is named by tags: `weights` and `kv_cache`. The engine works again once none is. A sleeping stand-in frees no
memory: it has none to free.
"""

import asyncio
from typing import cast

from starlette.requests import Request
from starlette.responses import Response

from serving.engines.mock.control import PauseMode
from serving.engines.mock.engine import Mocker
from serving.frontend.model_info import json_response
from serving.stand_in.vllm.answers.errors import RefusedError
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.stand_in.vllm.paths.bodies import choice, flag, whole_number

MODES = ("abort", "wait", "keep")
TAGS = frozenset(("weights", "kv_cache"))
SCHEDULING = "scheduling"
"""The tag that wakes what slept at level 0."""

PAUSE_S = 0.02
"""How long vLLM waits before it answers /pause, so that the last tokens of other requests are sent before."""

FAILED = "InternalServerError"


class Sleep:
    """Whether the engine sleeps, and the handlers that change that."""

    def __init__(self, engine: Mocker, metrics: VllmMetrics) -> None:
        self._engine = engine
        self._metrics = metrics
        self._asleep: frozenset[str] = frozenset()

    @property
    def is_paused(self) -> bool:
        """Whether new requests wait."""
        return any(rank.control.is_paused for rank in self._engine.ranks)

    @property
    def is_sleeping(self) -> bool:
        """Whether anything is asleep, or the engine is paused."""
        return bool(self._asleep) or self.is_paused

    async def on_sleep(self, request: Request) -> Response:
        """POST /sleep."""
        level = whole_number(request, "level", 0, 2, 1)
        await self._pause(_mode(request), clears_cache=level >= 1)
        if level >= 1:
            self._asleep |= TAGS
        self._metrics.sleep_level = level
        return json_response({"status": "sleeping", "level": level})

    async def on_wake_up(self, request: Request) -> Response:
        """POST /wake_up."""
        tags = request.query_params.getlist("tags") or None
        woken = [tag for tag in tags or () if tag != SCHEDULING]
        if tags is None:
            self._asleep = frozenset()
        elif self._asleep.issuperset(woken):  # as in vLLM, none of them wakes if one does not sleep
            self._asleep -= set(woken)
        if not self._asleep:
            self._resume()
            self._metrics.sleep_level = None
        return json_response({"status": "sleeping" if self._asleep else "awake", "tags": tags})

    async def on_is_sleeping(self, request: Request) -> Response:
        """GET /is_sleeping."""
        return json_response({"is_sleeping": self.is_sleeping})

    async def on_release_kv(self, request: Request) -> Response:
        """POST /release_kv_cache_memory."""
        call = "Call to release_kv_cache_memory method failed: "
        if not self.is_paused or any(not rank.engine.is_idle for rank in self._engine.ranks):
            raise RefusedError(500, FAILED, f"{call}release_kv_cache_memory() requires a completed pause first")
        if self._asleep:
            raise RefusedError(500, FAILED, f"{call}all memory must be resident, and {sorted(self._asleep)} sleep")
        for rank in self._engine.ranks:
            await rank.control.reset_prefix_cache(preempts_running=True)
        self._asleep = frozenset(("kv_cache",))
        self._metrics.sleep_level = 0
        return json_response({"status": "kv_cache_released"})

    async def on_pause(self, request: Request) -> Response:
        """POST /pause."""
        await self._pause(_mode(request), clears_cache=flag(request, "clear_cache", True))
        await asyncio.sleep(PAUSE_S)
        return json_response({"status": "paused"})

    async def on_resume(self, request: Request) -> Response:
        """POST /resume."""
        self._resume()
        return json_response({"status": "resumed"})

    async def on_is_paused(self, request: Request) -> Response:
        """GET /is_paused."""
        return json_response({"is_paused": self.is_paused})

    async def _pause(self, mode: PauseMode, *, clears_cache: bool) -> None:
        if clears_cache and mode != "abort" and self._engine.ranks[0].has_host_memory:
            what = f"a pause of mode {mode} that clears the cache is not simulated with KV in host memory"
            raise RefusedError(501, "NotImplementedError", f"{what}; use mode=abort, or clear_cache=false")
        for rank in self._engine.ranks:
            try:
                await rank.control.pause(mode, clears_cache=clears_cache)
            except RuntimeError as error:
                raise RefusedError(500, FAILED, f"the prefix cache cannot be reset: {error}") from error

    def _resume(self) -> None:
        for rank in self._engine.ranks:
            rank.control.resume()


def _mode(request: Request) -> PauseMode:
    return cast(PauseMode, choice(request, "mode", MODES, "abort"))
