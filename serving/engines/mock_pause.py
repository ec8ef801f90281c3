"""Pauses of a rank of the mocker, in vLLM's modes.

    abort    requests in progress end, with what was generated so far
    wait     requests that run end by themselves; the others wait
    keep     nothing happens to any request until the engine resumes

Requests that come during a pause wait for its end.
"""

from typing import Literal

from serving.engines.mock_rank import MockEngine

PauseMode = Literal["abort", "wait", "keep"]


async def pause(rank: MockEngine, mode: PauseMode, *, clears_cache: bool) -> None:
    """Pause a rank, and wait until it does nothing any more.

    With `clears_cache`, its prefix cache is empty afterwards, and requests that were kept compute their KV again.
    """
    if mode == "abort":
        for live in rank.lives():
            rank.abort(live)
    rank.engine.scheduler.pause = "all" if mode == "keep" else "new"
    await rank.until_quiet()
    if clears_cache:
        await rank.reset_prefix_cache(preempts_running=True)


def resume(rank: MockEngine) -> None:
    """End a pause, if there is one."""
    rank.engine.scheduler.pause = None
    rank.wake()
