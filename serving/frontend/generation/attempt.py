"""The attempts to generate a choice's tokens: each is a call to one worker, or to two that share the request.

    place: route, book, send ---> take output -------> a call ends ---> Finished, Refused
      ^                                                     |
      +---- what remains to be generated <---- PlaceAgain --+        `serving.life` decides which, and for which stage

    source first        prefill: its answer says where the KV is ---> decode with that
    destination first   prefill and decode at once; if either fails, both end

If an instance is lost, the tokens so far become part of the prompt on another one. Each attempt has its own calls, so
late output from a lost instance cannot reach us.
"""

import asyncio
import contextlib
import time
from collections.abc import Iterator
from dataclasses import replace

from serving.frontend.api.errors import ApiError, failed_call, no_worker
from serving.frontend.generation.call import Call, ChoiceRequest, whole
from serving.frontend.generation.output import Output
from serving.life import Finished, Life, Refused
from serving.life.life import RETRY_S, Stage
from serving.router.router import AllBusyError, AllFullError, NoWorkersError
from serving.routing.placement import Placement, Wanted
from serving.routing.workers import Course, Workers
from serving.runtime.messages import CallError, End

FULL = (AllBusyError, AllFullError)
UNPLACED = (NoWorkersError, *FULL, CallError)
"""Errors that mean that no worker accepts a request now."""

PROMPT_S = 30.0
"""How long an answer waits for its prefill worker's prompt log-probabilities, if the client asked for them."""

LATE_S = 1.0
"""How long the end of an answer waits for the number of cached tokens."""


class Attempts:
    """Calls workers until a choice's answer is complete; `close` it then, and on any other way out."""

    def __init__(self, stages: Course, request: ChoiceRequest, life: Life, *, is_refusable: bool = True) -> None:
        """Route and send the request; if it is not refusable, full workers do not refuse it.

        If it may wait for a worker, it is not placed yet: then call `until_placed`.

        Raises:
            ApiError: there is no worker to send it to.
        """
        self.life = life
        self.prefill: Call | None = None
        """The last call to a worker that only prefills."""
        self.decode: Call | None = None
        """The last call to a worker that answers."""
        self.prefilled: Output | None = None
        """The output of the worker that prefilled."""
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        """When the first and the last token arrived, by the process's performance counter; 0 until then."""
        self.has_bypassed = False
        """Whether a decode worker computes the prompt although there are prefill workers (short prompt, or they are busy)."""
        self._stages = stages
        self._request = request
        self._num_output = 0
        self._generated: list[int] = []  # kept while another attempt may need it
        self._watching: asyncio.Task[None] | None = None  # the prefill worker, while another answers
        self._has_prefill_failed = False
        self._is_refusable = is_refusable
        try:
            self._place(request, is_refusable=is_refusable)
        except UNPLACED as error:
            if not life.may_wait(asyncio.get_running_loop().time()):
                raise no_worker(error) from error

    @property
    def is_placed(self) -> bool:
        """Whether it has been sent to a worker."""
        return self.prefill is not None or self.decode is not None

    async def until_placed(self) -> None:
        """Wait until the request can be sent to a worker for the first time, if it may.

        Raises:
            ApiError: no worker accepts it, or none has come in time.
        """
        if not self.is_placed:
            await self._place_again(is_refusable=self._is_refusable)

    @property
    def placement(self) -> Placement:
        """Where the answer comes from; until that is known, where its prompt is computed."""
        call = self.decode or self.prefill
        assert call is not None
        return call.placement

    @property
    def prompt_placement(self) -> Placement:
        """Where the prompt is computed."""
        call = self.prefill or self.decode
        assert call is not None
        return call.placement

    async def take(self) -> Output:
        """Wait for output from the engine, in this attempt or the next.

        Raises:
            ApiError: the request failed.
        """
        while True:
            if (call := self.decode) is None:
                await self._take_prompt()
                continue
            output = Output()
            end = await call.read(output)
            if not output.has_news:
                if end is None:
                    continue
                output.finish_reason = await self._after(end)
                if not output.finish_reason:
                    continue
            self.last_token_s = time.perf_counter()
            self.first_token_s = self.first_token_s or self.last_token_s
            if self.prefill is not None:
                await self._add_prefilled(output)
            self._num_output += len(output.texts or output.tokens)
            if self.life.limit:
                self._generated += output.tokens
            return output

    @property
    def hand_over_s(self) -> float | None:
        """Time from the prompt's end at one worker to the first token at another (s), an upper bound for the KV transfer."""
        if self.prefill is None or not self.prefill.ended_s or not self.first_token_s:
            return None
        return max(self.first_token_s - self.prefill.ended_s, 0.0)

    def stamps(self) -> dict[str, float]:
        """Return the time of each event, by the process's performance counter, under the names of the results folder."""
        prefill, decode, stamps = self.prefill, self.decode, dict[str, float]()
        if prefill is not None:
            stamps = {"prefill_queued": prefill.sent_s, "prefill_end": prefill.ended_s, **prefill.stamps()}
        if decode is not None:
            if prefill is not None or self.has_bypassed:
                stamps["decode_queued"] = decode.sent_s
            stamps |= {name: at for name, at in decode.stamps().items() if name not in stamps}
        return {name: at for name, at in stamps.items() if at}

    def close(self, *, has_stopped: bool = False) -> None:
        """Release the bookings, and cancel the calls still in progress: because the answer has stopped, or is given up."""
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None
        for call in (self.prefill, self.decode):
            if call is not None:
                call.close(has_stopped=has_stopped)

    async def _take_prompt(self) -> None:
        """Wait until the prompt is computed, and place the rest.

        Raises:
            ApiError: the request failed.
        """
        assert self.prefill is not None
        output, end = await whole(self.prefill)
        if not end.kind and output.kv_transfer_params is None:
            end = End(0, "its answer does not say where the KV is: expected kv_transfer_params", "engine")
        self.prefilled = output
        await self._follow(end, self.prefill, "prefill")

    async def _add_prefilled(self, output: Output) -> None:
        """Add what the worker that computed the prompt knows about it; the one that answers cannot know."""
        if (watching := self._watching) is not None:
            wants_prompt = not self._num_output and "prompt_logprobs" in self._request.sampling
            if wants_prompt or output.finish_reason:
                await asyncio.wait([watching], timeout=PROMPT_S if wants_prompt else LATE_S)
        prefilled = self.prefilled
        output.num_cached = None if prefilled is None else prefilled.num_cached
        output.tier_tokens = None if prefilled is None else prefilled.tier_tokens
        output.prompt_logprobs = None if prefilled is None else prefilled.prompt_logprobs

    async def _watch(self, prefill: Call, decode: Call) -> None:
        """Read a prefill worker's output while a decode worker answers; if it fails before all KV is there, both end."""
        try:
            self.prefilled, end = await whole(prefill)
        except ApiError as error:
            end = End(0, error.message, "engine")
        if end.kind and not decode.has_begun:
            self._has_prefill_failed = True
            decode.abort(end.error, end.kind)

    async def _after(self, end: End) -> str:
        """After a call ended early, place the rest again, or return why the answer is finished."""
        assert self.decode is not None
        if self._has_prefill_failed and self.prefill is not None:
            return await self._follow(end, self.prefill, "prefill")
        if (
            end.kind in ("lost", "overloaded") and self.prefill is not None
        ):  # either may be the cause: try neither again
            self.life.failed_at.add(self.prefill.instance_id)
        if (
            end.kind == "invalid" and self.prefill is not None
        ):  # what one worker passes to the other is not the client's fault
            end = End(end.id, end.error, "engine")
        return await self._follow(end, self.decode, "decode")

    async def _follow(self, end: End, call: Call, stage: Stage) -> str:
        """Carry out what follows the end of a call; return why the answer is finished, if it is.

        Raises:
            ApiError: the request failed.
        """
        loop, limit = asyncio.get_running_loop(), self._request.conditions.max_tokens
        step = self.life.on_end(
            end.error,
            end.kind,
            call.instance_id,
            stage=stage,
            is_full=limit is not None and self._num_output >= limit,
            now=loop.time(),
        )
        if isinstance(step, Finished):
            return step.reason
        if isinstance(step, Refused):
            is_theirs = step.kind in ("lost", "engine")  # not the client's fault, nor a general state
            raise failed_call(f"{call.name}: {step.message}" if is_theirs else step.message, step.kind)
        if self._num_output and not self._request.can_continue:
            problem = (
                f"{end.error}; an answer with a constraint cannot continue elsewhere: the constraint would begin again"
            )
            raise failed_call(f"{call.name}: {problem}", end.kind)
        await asyncio.sleep(step.after_s)
        if not self.life.is_prefilled:
            self.close()
        elif self.decode is not None:
            self.decode.close()
        await self._place_again()
        return ""

    async def _place_again(self, *, is_refusable: bool = False) -> None:
        loop, request = asyncio.get_running_loop(), self._request.after(self._generated)
        while True:
            try:
                self._place(request, is_refusable=is_refusable)
            except UNPLACED as error:
                is_refused = is_refusable and isinstance(error, FULL)
                if is_refused or not self.life.may_wait(loop.time()):
                    raise no_worker(error) from error
            else:
                return
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(self.life.waits_until):
                    await self._stages.decode.wait_for_workers()

    def _place(self, request: ChoiceRequest, *, is_refusable: bool) -> None:
        """Route, book and send for the next stage.

        Raises:
            UNPLACED: no worker accepts it now.
        """
        life, prefill, own, bypass = self.life, self._stages.prefill, request.kv_transfer_params, None
        if not (life.is_prefilled or life.is_whole or life.is_pinned or own):
            bypass = self._stages.bypass(len(request.prompt.tokens), request.prompt.hashes)
        stage = life.next_stage(
            now=asyncio.get_running_loop().time(),
            has_prefill=prefill is not None,
            bypasses=bypass is not None or own is not None,
        )
        if isinstance(stage, Refused):
            raise NoWorkersError(stage.message)
        if stage == "prefill":
            assert prefill is not None
            self._place_both(prefill, request, is_refusable=is_refusable)
            return
        if life.is_prefilled:
            assert self.prefilled is not None
            request = request.to_decode(self.prefilled.kv_transfer_params or {})
        else:
            self.prefill, self.has_bypassed = None, bypass is not None
            if bypass is not None:
                request = replace(request, instance_id=bypass.instance_id, rank=bypass.dp_rank)
        is_for_prefill = own is not None and own.get("do_remote_decode") is True
        if is_for_prefill and prefill is None and self._stages.decode.stage == "decode":
            raise NoWorkersError("there is no prefill worker now")
        workers = prefill if is_for_prefill and prefill is not None else self._stages.decode
        call = self._book(workers, request, is_refusable=is_refusable)
        with closed_unless_sent(call):
            call.send(request, is_refusable=is_refusable)
        self.decode = call

    def _place_both(self, prefill: Workers, request: ChoiceRequest, *, is_refusable: bool) -> None:
        """Have a prompt computed; if both workers of a request are called at once, call the decode worker, too.

        Raises:
            UNPLACED: no worker accepts it now.
        """
        self.prefilled = self.decode = None
        self.has_bypassed = self._has_prefill_failed = False
        call = self.prefill = self._book(prefill, request, is_refusable=is_refusable)
        with closed_unless_sent(call):
            meeting = self._stages.meet(call.placement)
            if meeting is None:
                call.send(request.to_prefill({}), is_refusable=is_refusable)
                return
            answer = request.to_decode({**meeting, "do_remote_prefill": True, "do_remote_decode": False})
            other = self._book(self._stages.decode, answer, is_refusable=is_refusable)
            with closed_unless_sent(other):
                other.send(answer, is_refusable=is_refusable)
                call.send(request.to_prefill(meeting), is_refusable=is_refusable)
        self.decode = other
        self._watching = asyncio.create_task(self._watch(call, other))

    def _book(self, workers: Workers, request: ChoiceRequest, *, is_refusable: bool) -> Call:
        """Choose a worker.

        Raises:
            UNPLACED: there is none now.
        """
        params = request.kv_transfer_params
        wanted = Wanted(
            len(request.prompt.tokens),
            request.prompt.hashes,
            request.instance_id,
            request.rank,
            avoid=self.life.failed_at,
            session=request.session,
            is_refusable=is_refusable,
            is_local=not (params and params.get("do_remote_prefill")),
        )
        return Call(workers, workers.pick(wanted))


@contextlib.contextmanager
def closed_unless_sent(call: Call) -> Iterator[None]:
    """Close a call if an error keeps it from being sent."""
    try:
        yield
    except BaseException:
        call.close()
        raise
