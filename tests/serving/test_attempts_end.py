"""The live driver of a flight: however calls end, and whoever leaves, no booking, no call and no task is left."""

import asyncio
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.frontend.api.errors import ApiError
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.kv_transfer import KvTransfer
from serving.frontend.prepared import PreparedPrompt
from serving.life import DisaggregationConfig
from serving.life.terms import Terms
from serving.router import RoutingDecision
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.placement import Placement, RankAddress
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import CallError, End
from serving.worker.protocol import StopConditions

KINDS = ["lost", "draining", "unknown", "overloaded", "unavailable", "engine", "invalid", "full"]
NUM_TURNS = 8
"""Turns of the event loop in which all that follows from an event happens."""

MAX_ROUNDS = 100
"""Rounds in which all goes well, after which an answer is there; a second passes in each."""


class Loop(asyncio.SelectorEventLoop):
    """An event loop whose time passes only when it is told to."""

    now = 100.0

    def time(self):
        return self.now


class Pool:
    """The workers of one stage; what is booked and which calls are open is counted here."""

    def __init__(self, stage, first, num_workers):
        self.stage = stage
        self.names = count(first)
        self.workers = {next(self.names) for _ in range(num_workers)}
        self.booked, self.open, self.sent = {}, {}, {}
        self.refusals = []
        self.hangs_up = False
        self.has_some = asyncio.Event()
        self.come(0)
        self._numbers = count()

    @property
    def num_ranks(self):
        return len(self.workers)

    async def wait_for_workers(self):
        await self.has_some.wait()

    def come(self, num_workers=1):
        self.workers |= {next(self.names) for _ in range(num_workers)}
        if self.workers:
            self.has_some.set()

    def pick(self, wanted):
        assert not self.booked, "it is booked twice"
        if self.refusals and (wanted.is_refusable or self.refusals[-1] is not AllFullError):
            raise self.refusals.pop()("refused")
        fitting = self.workers if wanted.instance_id is None else self.workers & {wanted.instance_id}
        if not fitting:
            raise NoWorkersError("nobody is there")
        chosen, number = min(fitting, key=lambda each: (each in wanted.avoid, each)), next(self._numbers)
        self.booked[number] = chosen
        return Placement(number, RankAddress(chosen, 0), chosen, 0, RoutingDecision(chosen, 0, 0, 0), 0)

    def send(self, placement, request):
        assert not self.open, "there is a call already"
        if self.hangs_up:
            self.hangs_up = False
            raise CallError("it hung up", "lost")
        stream = self.open[placement.request] = ReplyStream(self, placement.request)
        self.sent[placement.request] = request
        return stream

    def forget(self, id, *, cancel):
        self.open.pop(id, None)

    def on_first_token(self, placement):
        assert placement.request in self.booked or self.stage == "prefill"

    def on_finish(self, placement):
        del self.booked[placement.request]

    # What may happen

    def say(self, *items):
        for stream in self.open.values():
            stream.items += items
            stream.wake()

    def answer(self):
        """Say the next token: which one it is depends on what came before."""
        for id, stream in self.open.items():
            place = self.sent[id].num_generated + stream._num_taken + len(stream.items)
            self.say(place)

    def end(self, kind=""):
        for id, stream in list(self.open.items()):
            del self.open[id]
            stream.end = End(id, "it went wrong" if kind else "", kind)
            stream.wake()

    def lose(self):
        """Lose the worker that has the call, or any."""
        gone = next(iter(self.booked.values()), min(self.workers, default=None))
        self.workers.discard(gone)
        if not self.workers:
            self.has_some.clear()
        self.end("lost")


class Course:
    """Two pools, which meet in a room or not."""

    def __init__(self, config, data):
        self.config = config
        self.decode = Pool("decode", 10, data.draw(st.integers(0, 2), "decode workers"))
        self.prefills = Pool("prefill", 20, data.draw(st.integers(0, 2), "prefill workers"))
        self.has_rooms = data.draw(st.booleans(), "rooms")
        self.bypasses = data.draw(st.booleans(), "bypass")

    @property
    def pools(self):
        return self.prefills, self.decode

    @property
    def prefill(self):
        return self.prefills if self.prefills.workers else None

    def bypass(self, num_tokens, hashes):
        return RankAddress(min(self.decode.workers), 0) if self.bypasses and self.decode.workers else None

    def meet(self, placement):
        return {"bootstrap_room": placement.request} if self.has_rooms else None


TERMS = st.builds(
    Terms,
    limit=st.integers(0, 2),
    config=st.builds(
        DisaggregationConfig,
        conditional_disagg=st.sampled_from(["never", "isl_bounding"]),
        enforce_disagg=st.booleans(),
        prefill_fallback=st.booleans(),
    ),
    is_pinned=st.booleans(),
    is_whole=st.booleans(),
    can_continue=st.booleans(),
)
OWN = st.none() | st.sampled_from([{"do_remote_decode": True}, {"do_remote_prefill": True}]).map(KvTransfer.of)
KV = {"kv_transfer_params": {"do_remote_prefill": True}}
RUBBISH = st.sampled_from(["rubbish", {"log_probs": [-0.5, -1.5], "top_logprobs": [None]}])
EVENTS = st.sampled_from(
    ["kv", "token", "token", "end", "fail", "rubbish", "lose", "come", "refuse", "hang up", "late"]
)


async def read(attempts, tokens):
    """Read an answer to its end, whatever that is."""
    try:
        await attempts.until_placed()
        while True:
            output = await attempts.take()
            tokens += output.tokens
            if output.finish_reason:
                return
    except ApiError as error:
        assert "given up" not in error.message
    finally:
        attempts.close()


def happen(event, course, data):
    """Let something happen at one of the pools."""
    pool = data.draw(st.sampled_from(course.pools), "pool")
    match event:
        case "kv":
            course.prefills.say(KV)
        case "token":
            course.decode.answer()
        case "end":
            course.decode.say({"finish_reason": "stop"}) if data.draw(st.booleans(), "says why") else None
            pool.end()
        case "fail":
            pool.end(data.draw(st.sampled_from(KINDS), "kind"))
        case "rubbish":
            pool.say(data.draw(RUBBISH, "rubbish"))
        case "lose":
            pool.lose()
        case "come":
            pool.come()
        case "refuse":
            pool.refusals = [data.draw(st.sampled_from([AllBusyError, AllFullError, NoWorkersError]), "error")]
        case "hang up":
            pool.hangs_up = True
        case "late":
            asyncio.get_running_loop().now += 31.0


async def turns():
    for _ in range(NUM_TURNS):
        await asyncio.sleep(0)


async def live(data):
    """Let a request live, and return what is left of it."""
    terms = data.draw(TERMS, "terms")
    course, tokens = Course(terms.config, data), []
    request = ChoiceRequest(
        prompt=PreparedPrompt(np.arange(3, dtype=np.uint32), 4),
        conditions=StopConditions(max_tokens=data.draw(st.integers(1, 4), "limit")),
        sampling=data.draw(st.sampled_from([{}, {"prompt_logprobs": 1}]), "sampling"),
        eos_token_ids=[],
        request_id="r",
        instance_id=10 if terms.is_pinned else None,
        kv_transfer=data.draw(OWN, "own") if terms.is_whole else None,
    )
    try:
        attempts = Attempts.begin(course, request, terms, is_refusable=data.draw(st.booleans(), "refusable"))
    except ApiError:
        assert not [pool for pool in course.pools if pool.booked or pool.open]
        return
    reading = asyncio.create_task(read(attempts, tokens))
    await turns()
    for event in data.draw(st.lists(EVENTS, max_size=12), "events"):
        happen(event, course, data)
        await turns()
    reading.cancel() if data.draw(st.booleans(), "leaves") else None
    for _ in range(MAX_ROUNDS):  # all goes well from now on
        if reading.done():
            break
        for pool in course.pools:
            pool.come(not pool.workers)
        course.prefills.say(KV)  # and the call is held open
        for pool in course.pools if terms.is_whole else [course.decode]:
            pool.say({"finish_reason": "stop"})
        asyncio.get_running_loop().now += 1.0
        await turns()
    await turns()
    assert reading.done()
    assert reading.cancelled() or reading.result() is None
    assert attempts.flight.is_over
    assert not [pool for pool in course.pools if pool.booked or pool.open]
    assert asyncio.all_tasks() == {asyncio.current_task()}
    if terms.limit:
        assert tokens == list(range(len(tokens))), "an answer continues where it was"


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr("serving.frontend.generation.attempt.RETRY_S", 0.0)


@settings(max_examples=150)
@given(data=st.data())
def test_whatever_happens_to_a_request_nothing_of_it_stays_anywhere(data):
    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(live(data))
