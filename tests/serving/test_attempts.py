"""The calls for a choice of an answer, and what remains to be generated between them."""

import asyncio
from itertools import count
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from serving.frontend.api.errors import ApiError
from serving.frontend.generation.attempt import Attempts
from serving.frontend.generation.call import ChoiceRequest
from serving.frontend.generation.output import Output
from serving.frontend.prepared import PreparedPrompt
from serving.life import DisaggregationConfig
from serving.life.terms import Terms
from serving.router.decision import AllBusyError, AllFullError, NoWorkersError
from serving.routing.stages import Stages
from serving.runtime.connection import ReplyStream
from serving.runtime.messages import CallError, End
from serving.worker.protocol import StopConditions
from tests.support.waiting import in_time

# What remains


def request(tokens=(1, 2, 3), **conditions):
    return ChoiceRequest(
        prompt=PreparedPrompt(np.array(tokens, np.uint32), 4),
        conditions=StopConditions(**conditions),
        sampling={},
        eos_token_ids=[],
        request_id="r",
    )


def test_tokens_so_far_become_part_of_the_prompt():
    rest = request(max_tokens=10, min_tokens=1).after([7, 8])
    assert rest.prompt.tokens.tolist() == [1, 2, 3, 7, 8]
    assert rest.prompt.hashes == PreparedPrompt(np.array([1, 2, 3, 7], np.uint32), 4).hashes
    assert (rest.conditions.max_tokens, rest.conditions.min_tokens, rest.num_generated) == (8, 0, 2)
    assert request().after([7]).conditions.max_tokens is None


def test_the_place_of_the_eos_is_counted_from_where_an_answer_goes_on():
    assert request(stop_after=9).after([7, 8]).conditions.stop_after == 7
    assert request(stop_after=2).after([7, 8]).conditions.stop_after == 1  # lost between its last token and its end
    assert request().after([7]).conditions.stop_after is None


def test_items_of_every_kind_add_up():
    output = Output()
    output.read([5, [6, 7], {"token_ids": [8], "cached_tokens": 16, "finish_reason": "stop"}], 0)
    assert (output.tokens, output.num_cached, output.finish_reason) == ([5, 6, 7, 8], 16, "stop")


def test_tokens_that_an_engine_counts_are_those_of_its_own_attempt():
    output = Output()
    output.read([{"text": "on", "completion_tokens": 3}], 4)
    assert (output.texts, output.num_completion) == (["on"], 7)


RUBBISH = [
    *("text", None, -1, 1 << 32, 0.5, True, ["text"], [None], [-1]),
    *({"token_ids": 3}, {"token_ids": ["text"]}, {"text": None, "finish_reason": {}}, {"embedding": []}),
    *({"log_probs": [-0.5, -1.5], "top_logprobs": [None]}, {"log_probs": -0.5}, {"log_probs": ["likely"]}),
    *({"log_probs": [-0.5], "top_logprobs": [top]} for top in ([[7]], [["seven", -0.5]], [{"token": "seven"}], [7])),
    *({"prompt_log_probs": [None, -0.5], "prompt_top_logprobs": [None]}, {"prompt_log_probs": 1}),
    *({"embedding": [float("nan")]}, {"kv_transfer_params": "there"}, {"tier_tokens": {"host": "all"}}, {1: 2}),
]


@pytest.mark.parametrize("item", RUBBISH)
def test_an_item_that_means_nothing_is_an_error(item):
    with pytest.raises(ApiError, match="the engine sent") as failed:
        Output().read([item], 0)
    assert failed.value.status == 500


def test_log_probabilities_may_come_without_alternatives():
    output = Output()
    output.read([{"token_ids": [7], "log_probs": [-0.5], "prompt_log_probs": [None, -1.5]}], 0)
    assert (output.logprobs, output.prompt_logprobs) == ([(-0.5, None)], [(None, None), (-1.5, None)])


def test_alternatives_are_named_by_id_or_by_text():
    output, by_text = Output(), {"token": "on", "logprob": -1.5, "bytes": [111, 110]}
    output.read([{"token_ids": [7], "log_probs": [-0.5], "top_logprobs": [[[7, -0.5], by_text]]}], 0)
    assert output.logprobs == [(-0.5, [(7, -0.5), by_text])]


@pytest.mark.parametrize("count", [float("nan"), float("inf"), "many", None, []])
@pytest.mark.parametrize("name", ["cached_tokens", "completion_tokens"])
def test_a_number_of_tokens_that_is_none_is_an_error(name, count):
    with pytest.raises(ApiError, match=f"not an answer: Expected .* at `\\$.{name}`"):
        Output().read([{name: count}], 0)


def test_fewer_tokens_than_none_are_none():
    output = Output()
    output.read([{"cached_tokens": -5, "completion_tokens": -1}], 0)
    assert (output.num_cached, output.num_completion) == (0, 0)


def test_times_that_cannot_be_are_left_aside():
    output = Output()
    wrong = {"prefill_end": float("nan"), "decode_start": -1, "transfer_end": "soon", "transfer_start": 1e9, "other": 1}
    output.read(
        [{"times": {"admitted": 0.5, "transfer_bytes": 64, **wrong}}, {"times": {"decode_blocks": 1}}, {"times": 3}], 0
    )
    assert (output.times, output.num_transfer_bytes) == ({"admitted": 0.5, "decode_blocks": 1}, 64)
    output.read([{"times": {"transfer_bytes": float("inf")}}], 0)
    assert output.num_transfer_bytes == 64


# The attempts


class Rank(NamedTuple):
    instance_id: int
    dp_rank: int = 0


class Placement(NamedTuple):
    number: int
    rank: Rank


class Fleet:
    """Instances that answer as they are told to, and a router that takes the first that has not failed."""

    def __init__(self, **answers: list[Any]) -> None:
        self.answers = {int(name.removeprefix("at_")): items for name, items in answers.items()}
        self.booked: dict[int, int] = {}
        self.sent: list[tuple[int, Any]] = []
        self.first_tokens: list[int] = []
        self.refused: list[Exception] = []
        self._numbers = count()
        self.stage = "decode"

    def pick(self, wanted):
        if self.refused:
            raise self.refused.pop(0)
        chosen = min(self.answers, key=lambda instance: (instance in wanted.avoid, instance))
        placement = Placement(next(self._numbers), Rank(chosen))
        self.booked[placement.number] = chosen
        return placement

    def send(self, placement, request):
        id = placement.rank.instance_id
        if isinstance(self.answers[id], CallError):
            raise self.answers[id]
        self.sent.append((id, request))
        stream = ReplyStream(self, placement.number)
        *stream.items, kind = self.answers[id]
        stream.end = End(0, "it is gone" if kind else "", kind)
        return stream

    def on_first_token(self, placement):
        self.first_tokens.append(placement.rank.instance_id)

    def on_finish(self, placement):
        del self.booked[placement.number]

    async def wait_for_workers(self):
        pass

    def forget(self, id, *, cancel):
        """Stand in for the connection of a stream."""


def taken(fleet, limit=3, *, can_continue=True, **conditions):
    """Return all tokens that the attempts bring, and how they finish."""

    async def run():
        attempts = Attempts.begin(Stages(fleet), request(**conditions), Terms(limit, can_continue=can_continue))
        tokens = []
        try:
            async with in_time():
                while True:
                    output = await attempts.take()
                    tokens += output.tokens
                    if output.finish_reason:
                        return tokens, output.finish_reason
        finally:
            attempts.close()

    try:
        return asyncio.run(run())
    finally:
        assert not fleet.booked


def test_a_choice_goes_on_where_the_lost_instance_left_off():
    fleet = Fleet(at_1=[7, 8, "lost"], at_2=[9, {"finish_reason": "stop"}, ""])
    assert taken(fleet, max_tokens=10) == ([7, 8, 9], "stop")
    (_, first), (second_at, second) = fleet.sent
    assert (second_at, second.num_generated, second.stop_conditions.max_tokens) == (2, 2, 8)
    assert (first.is_refusable, second.is_refusable) == (True, False)
    assert fleet.first_tokens == [1, 2]


def test_it_waits_for_an_instance_once_it_was_accepted():
    fleet = Fleet(at_1=["lost"], at_2=[9, ""])
    original = fleet.send

    def send(placement, request):
        stream = original(placement, request)
        fleet.refused = [NoWorkersError("none")] if len(fleet.sent) == 1 else []
        return stream

    fleet.send = send
    assert taken(fleet) == ([9], "stop")


def test_an_answer_waits_while_the_only_instance_is_known_and_takes_no_more(monkeypatch):
    monkeypatch.setattr("serving.frontend.generation.attempt.RETRY_S", 0.001)
    fleet = Fleet(at_1=[7, "lost"])
    original = fleet.send

    def send(placement, request):
        stream = original(placement, request)
        fleet.answers = {1: ["draining"]} if len(fleet.sent) < 30 else {2: [9, ""]}
        return stream

    fleet.send = send
    assert taken(fleet) == ([7, 9], "stop")


def test_without_migration_a_lost_request_fails():
    with pytest.raises(ApiError, match="decode worker 1: it is gone") as failed:
        taken(Fleet(at_1=[7, "lost"], at_2=[9, ""]), limit=0)
    assert failed.value.status == 502


def test_an_answer_whose_constraint_would_begin_again_continues_nowhere_once_it_has_begun():
    with pytest.raises(ApiError, match="an answer with a constraint cannot continue elsewhere") as failed:
        taken(Fleet(at_1=[7, "lost"], at_2=[9, ""]), can_continue=False)
    assert failed.value.status == 502
    assert taken(Fleet(at_1=["lost"], at_2=[9, ""]), can_continue=False) == ([9], "stop")


@pytest.mark.parametrize(("error", "status"), [(AllFullError(), 429), (NoWorkersError("none is there"), 503)])
def test_a_request_that_nobody_takes_is_refused_at_once(error, status):
    fleet = Fleet(at_1=[""])
    fleet.refused = [error]
    with pytest.raises(ApiError) as refused:
        taken(fleet)
    assert refused.value.status == status


class Prefilling:
    """A prefill pool that comes when it is told to."""

    num_ranks = 1

    def __init__(self, error):
        self.core = SimpleNamespace(stage="prefill")
        self.error = error
        self.is_refusable = None

    def pick(self, wanted):
        self.is_refusable = wanted.is_refusable
        raise self.error


def enforced(monkeypatch, patience_s, *, is_refusable=True, after=None):
    """Place a request that must be prefilled apart; `after` so many looks there is a prefill pool, which refuses."""
    monkeypatch.setattr("serving.life.life.PATIENCE_S", patience_s)
    monkeypatch.setattr("serving.frontend.generation.attempt.RETRY_S", 0.001)
    terms, looks, prefilling = Terms(3, DisaggregationConfig(enforce_disagg=True)), count(), Prefilling(after)

    async def run():
        stages = Stages(
            Fleet(at_1=[7, ""]),
            terms.config,
            find_prefill=lambda: prefilling if after is not None and next(looks) > 1 else None,
        )
        attempts = Attempts.begin(stages, request(), terms, is_refusable=is_refusable)
        assert not attempts.is_placed
        async with in_time():
            await attempts.until_placed()

    with pytest.raises(ApiError) as refused:
        asyncio.run(run())
    return refused.value, prefilling


def test_a_request_that_must_be_prefilled_apart_is_refused_once_nobody_has_come_to_prefill(monkeypatch):
    error, _ = enforced(monkeypatch, 0.05)
    assert (error.status, error.message) == (503, "there is no prefill worker, and enforce_disagg is on")


@pytest.mark.parametrize(
    ("reason", "status"), [(AllFullError("full"), 429), (AllBusyError("busy"), 503), (NoWorkersError("gone"), 503)]
)
def test_a_request_that_waited_for_a_prefill_worker_is_refused_as_a_new_one_if_that_is_full(
    monkeypatch, reason, status
):
    is_gone = isinstance(reason, NoWorkersError)  # then it waits to the end
    error, prefilling = enforced(monkeypatch, 0.05 if is_gone else 1e9, after=reason)
    assert (error.status, prefilling.is_refusable) == (status, True)


def test_what_was_accepted_with_it_waits_for_a_worker_that_is_busy(monkeypatch):
    error, prefilling = enforced(monkeypatch, 0.05, after=AllBusyError("busy"), is_refusable=False)
    assert (error.status, prefilling.is_refusable) == (503, False)


def test_a_request_that_cannot_be_sent_leaves_no_booking():
    fleet = Fleet(at_1=[])
    fleet.answers[1] = CallError("it hung up", "lost")
    with pytest.raises(ApiError, match="it hung up"):
        taken(fleet)


def test_a_request_that_cannot_be_written_leaves_no_booking():
    fleet = Fleet(at_1=[])

    def send(placement, request):
        raise OverflowError("no such integer")

    fleet.send = send
    with pytest.raises(OverflowError):
        taken(fleet)
