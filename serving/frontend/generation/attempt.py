"""The attempts to generate a choice's tokens: each is a call to one worker, or to two that share the request.

What happens to a request is decided by its flight (`serving.life.flight`). This is its driver on sockets: it reports how
calls end, and carries out what follows.

    source first        prefill: its answer says where the KV is ---> decode with that
    destination first   prefill and decode at once; if either fails, both end

If an instance is lost, the tokens so far become part of the prompt on another one. Each attempt has its own calls, so
late output from a lost instance cannot reach us.
"""

import asyncio
import contextlib
from dataclasses import replace

from serving.frontend.api.errors import ApiError, failed_call, no_worker
from serving.frontend.generation.call import ChoiceRequest, WorkerCall
from serving.frontend.generation.output import Output
from serving.life.effects import Abort, Answer, Begin, Effects, Fail, Lease, LetGo, Place, Release, Send, Wait
from serving.life.flight import Flight
from serving.life.leg import Leg
from serving.life.terms import Terms
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.placement import Placement, WantedRank
from serving.routing.workers import Course, Workers
from serving.runtime.messages import CallError, End
from serving.runtime.world import world

UNPLACED = (NoWorkersError, AllBusyError, AllFullError, CallError)
"""Errors that mean that no worker accepts a request now."""

RETRY_S = 0.05
"""How often a request that waits for a worker looks for one."""

PROMPT_S = 30.0
"""How long an answer waits for its prefill worker's prompt log-probabilities, if the client asked for them."""

LATE_S = 1.0
"""How long the end of an answer waits for the number of cached tokens."""


class Attempts:
    """Calls workers until a choice's answer is complete; `close` it then, and on any other way out."""

    def __init__(self, stages: Course, request: ChoiceRequest, terms: Terms, *, is_refusable: bool) -> None:
        """Prepare to send a request (see `begin`)."""
        self.flight = Flight(0, terms)
        self.prefill: WorkerCall | None = None
        """The last call to a worker that only prefills."""
        self.decode: WorkerCall | None = None
        """The last call to a worker that answers."""
        self.first_token_s = 0.0
        self.last_token_s = 0.0
        """When the first and the last token arrived, by `World.now`; 0 until then."""
        self._stages = stages
        self._request = request
        """What remains to be asked for."""
        self._is_refusable = is_refusable
        self._finish_reason = ""
        self._error: ApiError | None = None
        self._waits_until = 0.0
        self._watching: asyncio.Task[None] | None = None  # the prefill worker, while another answers
        self._loop = asyncio.get_running_loop()
        self._now = world().now  # more precise than the loop's

    @classmethod
    def begin(cls, stages: Course, request: ChoiceRequest, terms: Terms, *, is_refusable: bool = True) -> "Attempts":
        """Route and send a request; if it is not refusable, full workers do not refuse it.

        If it may wait for a worker, it is not placed yet: then call `until_placed`.

        Raises:
            ApiError: there is no worker to send it to.
        """
        attempts = cls(stages, request, terms, is_refusable=is_refusable)
        try:
            attempts._begin()
            if attempts.flight.is_over:
                attempts._raise_if_failed()
        except BaseException:
            attempts.close()
            raise
        return attempts

    @property
    def is_placed(self) -> bool:
        """Whether it is at a worker, rather than waiting for one."""
        return self.flight.waits_for is None

    async def until_placed(self) -> None:
        """Wait until the request can be sent to a worker for the first time, if it may.

        Raises:
            ApiError: no worker accepts it, or none has come in time.
        """
        while not self.is_placed:
            await self._wait()
        self._raise_if_failed()

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
        """Wait for output from the engine, in this attempt or the next; from now on the request counts as accepted.

        Raises:
            ApiError: the request failed.
        """
        flight = self.flight
        self._is_refusable = False
        while True:
            leg, call = flight.decode, self.decode
            if leg is None or call is None:
                self._raise_if_failed()
                await (self._await_prompt(flight.prefill, meets=False) if self.is_placed else self._wait())
                continue
            output = Output()
            end = await call.read(output)
            if leg is not flight.decode:
                continue  # it was given up, because its prefill failed
            if output.tokens or output.texts or output.finish_reason:
                leg.is_answering = True
            elif end is None or not (reason := self._ended(call, end)):
                continue
            else:
                output.finish_reason = reason
            is_first, self.last_token_s = not self.first_token_s, self._now()
            if is_first:
                self.first_token_s = self.last_token_s
            if self.prefill is not None:
                await self._add_prefilled(self.prefill, output, is_first=is_first)
            call.num_received += len(output.texts or output.tokens)
            if flight.terms.limit:
                call.tokens += output.tokens
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
            if prefill is not None or self.flight.is_bypassed:
                stamps["decode_queued"] = decode.sent_s
            stamps |= {name: at for name, at in decode.stamps().items() if name not in stamps}
        return {name: at for name, at in stamps.items() if at}

    def close(self, *, has_stopped: bool = False) -> None:
        """Release the bookings, and cancel the calls still in progress: because the answer has stopped, or is given up."""
        self._act(self.flight.cancelled(), has_stopped=has_stopped)

    # What is reported

    def _begin(self) -> None:
        """Send what remains to be asked for on its way."""
        request, stages, only = self._request, self._stages, None
        has_prefill = stages.prefill is not None
        if has_prefill and self.flight.may_bypass:
            bypass = stages.bypass(len(request.prompt.tokens), request.prompt.hashes)
            if bypass is not None:
                only = bypass.instance_id
                request = replace(request, instance_id=only, rank=bypass.dp_rank)
        self.flight.payload = request
        self._act(self.flight.begin(self._loop.time(), has_prefill=has_prefill, bypass=only))

    async def _await_prompt(self, leg: Leg | None, *, meets: bool) -> None:
        """Wait for the end of a prefill, while another worker answers or before that, and report it if it is still wanted.

        Raises:
            ApiError: the engine sent something invalid.
        """
        assert leg is not None
        call, flight = _call_of(leg), self.flight
        try:
            output, end = await call.wait_for_kv()
        except ApiError as error:
            if not meets:
                raise
            output, end = Output(), End(0, error.message, "engine")
            call.close()
        if not (end.kind or meets) and output.kv_transfer_params is None:
            end = End(0, "its answer does not say where the KV is: expected kv_transfer_params", "engine")
        if flight.prefill is leg:
            now = self._loop.time()
            self._act(flight.prefill_failed(now, end.error, end.kind) if end.kind else flight.prefill_ended(now))

    def _ended(self, call: WorkerCall, end: End) -> str:
        """Report how the call to a decode worker has ended; return why the answer is finished, if it is.

        Raises:
            ApiError: the request failed.
        """
        limit = call.request.conditions.max_tokens
        self._request = self._request.after(call.tokens)
        is_full = limit is not None and call.num_received >= limit
        now, leg = self._loop.time(), self.flight.prefill
        if leg is not None and leg.state == "kept" and _call_of(leg).is_lost:
            self._act(self.flight.lost(leg, now))
        self._act(self.flight.ended(now, end.error, end.kind, is_full=is_full))
        self._raise_if_failed()
        return self._finish_reason

    async def _wait(self) -> None:
        """Wait a little while for a worker, and look again."""
        await asyncio.sleep(RETRY_S)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout_at(self._waits_until):
                await self._stages.decode.wait_for_workers()
        self._act(self.flight.wake())

    def _raise_if_failed(self) -> None:
        if self._error is not None:
            raise self._error

    async def _add_prefilled(self, prefill: WorkerCall, output: Output, *, is_first: bool) -> None:
        """Add what the worker that computed the prompt knows about it; the one that answers cannot know."""
        if (watching := self._watching) is not None:
            wants_prompt = is_first and "prompt_logprobs" in self._request.sampling
            if wants_prompt or output.finish_reason:
                await asyncio.wait([watching], timeout=PROMPT_S if wants_prompt else LATE_S)
        known = prefill.prefill_output or Output()
        output.num_cached, output.tier_tokens = known.num_cached, known.tier_tokens
        output.prompt_logprobs = known.prompt_logprobs

    # What is carried out

    def _act(self, effects: Effects, *, has_stopped: bool = False) -> None:
        """Carry out effects in order."""
        try:
            for effect in effects:
                match effect:
                    case Place("prefill"):
                        self._place_prefill()
                    case Place():
                        self._place_decode()
                    case Send("prefill"):
                        self._send_prefill()
                    case Send():
                        assert self.decode is not None
                        self.decode.send(is_refusable=self._is_refusable)
                    case Release(stage):
                        call = self.prefill if stage == "prefill" else self.decode
                        if call is not None:
                            call.settle()
                    case Abort(leg) | LetGo(leg):
                        assert isinstance(leg.call, WorkerCall)
                        leg.call.close(has_stopped=has_stopped)
                    case Begin():
                        self._begin()
                    case Answer(reason):
                        self._finish_reason = reason
                    case Fail(message, kind, leg):
                        # Name the worker only if the failure was its own.
                        name = f"{_call_of(leg).name}: " if leg is not None and kind in ("lost", "engine") else ""
                        self._error = failed_call(name + message, kind)
                    case Wait(until_s):
                        self._waits_until = until_s  # `take` and `until_placed` wait
                    case Lease():
                        pass  # workers keep the leases of their KV
                    case _:
                        raise AssertionError(f"{effect} is for those who move KV themselves")
        except UNPLACED as error:  # the rest of the effects is given up, too
            message, kind = no_worker(error).message, "full" if isinstance(error, AllFullError) else "unavailable"
            is_refused = self._is_refusable and isinstance(error, AllBusyError | AllFullError)
            self._act(self.flight.fail(message, kind) if is_refused else self.flight.nobody(message, self._loop.time()))

    def _place_prefill(self) -> None:
        leg, workers, request = self.flight.prefill, self._stages.prefill, self.flight.payload
        assert leg is not None
        assert workers is not None
        assert isinstance(request, ChoiceRequest)
        self.decode = None
        call = self.prefill = leg.call = self._book(workers, request)
        meeting = self._stages.meet(call.placement)
        call.request = request.to_prefill(meeting or {})
        slot = call.placement.rank.instance_id
        self._act(self.flight.placed("prefill", slot, meets=meeting is not None))

    def _place_decode(self) -> None:
        leg, stages, request = self.flight.decode, self._stages, self.flight.payload
        assert leg is not None
        assert isinstance(request, ChoiceRequest)
        workers, transfer = stages.decode, request.kv_transfer
        if transfer is not None and transfer.computes_prompt:  # a client that shares out the request itself
            if stages.prefill is None and workers.stage == "decode":
                raise NoWorkersError("there is no prefill worker now")
            workers = stages.prefill if stages.prefill is not None else workers
        if not leg.reads_kv:
            self.prefill = None
        elif self.prefill is not None:
            request = request.to_decode(self.prefill.where_kv_is())
        call = self.decode = leg.call = self._book(workers, request)
        self._act(self.flight.placed("decode", call.placement.rank.instance_id))

    def _book(self, workers: Workers, request: ChoiceRequest) -> WorkerCall:
        """Choose a worker.

        Raises:
            UNPLACED: there is none now.
        """
        transfer = request.kv_transfer
        wanted = WantedRank(
            len(request.prompt.tokens),
            request.prompt.hashes,
            request.instance_id,
            request.rank,
            avoid=self.flight.failed_at,
            session=request.session,
            adapter="" if request.scope is None else request.scope.lora_name,
            is_refusable=self._is_refusable,
            is_local=transfer is None or not transfer.reads_prompt,
        )
        return WorkerCall(workers, workers.pick(wanted), request)

    def _send_prefill(self) -> None:
        """Send the prompt to the worker that computes it.

        Raises:
            CallError: the worker is gone.
        """
        assert self.prefill is not None
        self.prefill.send(is_refusable=self._is_refusable)
        if self.flight.meets:
            self._watching = asyncio.create_task(self._await_prompt(self.flight.prefill, meets=True))


def _call_of(leg: Leg) -> WorkerCall:
    assert isinstance(leg.call, WorkerCall)
    return leg.call
