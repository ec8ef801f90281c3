"""What vLLM's own fields ask for is done by the scheduler, the cache and the author of the answers."""

import asyncio

import pytest

from serving.engines.mock.answers.words import repetition_place, without
from serving.engines.mock.engine import EngineConfig, TimingConfig
from serving.stand_in.config import ApiConfig
from tests.stand_in.support import running

DETAILS = ApiConfig(enable_prompt_tokens_details=True)


def answers(*bodies, path="/v1/completions", **settings):
    """Send requests one after the other; return their answers."""

    async def ask():
        async with running(**settings) as client:
            return [(await client.post(path, json=body)).json() for body in bodies]

    return asyncio.run(ask())


def body(prompt="x" * 64, **fields):
    return {"prompt": prompt, "max_tokens": 8} | fields


def text(answer):
    return answer["choices"][0]["text"]


def cached(answer):
    return answer["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("length", [64, 15])
def test_prompts_share_cached_blocks_only_with_prompts_of_the_same_salt(length):
    long = body("x" * length, max_tokens=40)
    more = body("x" * length + text(answers(long)[0])[:30])  # a conversation that goes on
    salted = more | {"cache_salt": "a"}
    found = answers(long, more, salted, salted, more | {"cache_salt": "b"}, api=DETAILS)
    warm = (length + 30 - 1) // 16 * 16
    assert [cached(each) for each in found[1:]] == [warm, 0, warm, 0]


def test_of_waiting_requests_the_one_of_the_smallest_priority_is_next():
    async def ask():
        engine = EngineConfig(block_size=16, num_gpu_blocks=256, max_num_seqs=1, scheduling_policy="priority")
        order = []
        async with running(engine=engine) as client:

            async def one(priority):
                await client.post("/v1/completions", json=body(f"{priority}", max_tokens=30, priority=priority))
                order.append(priority)

            first = body("first", max_tokens=400, stream=True)
            async with client.stream("POST", "/v1/completions", json=first) as stream:
                lines = stream.aiter_lines()
                await anext(lines)  # it runs, and lasts longer than the others take to arrive
                others = [asyncio.create_task(one(priority)) for priority in (5, 3, -1, 4)]
                async for _ in lines:
                    pass
            await asyncio.gather(*others)
        return order

    assert asyncio.run(ask()) == [-1, 3, 4, 5]


def test_an_answer_has_only_allowed_tokens():
    [answer] = answers(body(max_tokens=50, allowed_token_ids=[ord("q"), ord("z")]))
    assert set(text(answer)) == {"q", "z"}


def test_an_answer_has_no_bad_words():
    free, without_one = answers(body(max_tokens=200), body(max_tokens=200, bad_words=["e", "th"]))
    assert "e" in text(free) and "e" not in text(without_one) and "th" not in text(without_one)


def test_bad_words_that_leave_nothing_are_refused():
    [answer] = answers(body(allowed_token_ids=[97], bad_words=["a"]))
    assert "bad_words" in answer["error"]["message"]


def test_a_banned_sequence_is_replaced_at_its_last_token():
    assert without([1, 2, 3, 1, 2], [(1, 2)], [1, 2, 3]) == [1, 3, 3, 1, 3]


def test_a_repetition_ends_where_the_pattern_has_come_often_enough():
    assert repetition_place([1, 2, 1, 2, 1, 2, 9], (1, 3, 3)) == 6
    assert repetition_place([1, 2, 1, 2, 9], (1, 3, 3)) is None


def test_the_stop_reason_is_the_token_or_the_text_that_ended_the_answer():
    letter = text(answers(body())[0])[2]
    by_token, by_text, shown = answers(
        body(stop_token_ids=[ord(letter)]),
        body(stop=[letter]),
        body(stop=[letter], include_stop_str_in_output=True),
    )
    assert [each["choices"][0]["stop_reason"] for each in (by_token, by_text)] == [ord(letter), letter]
    assert text(shown) == text(by_text) + letter


def test_token_ids_are_those_of_the_text():
    [answer] = answers(body("ab", return_token_ids=True))
    choice = answer["choices"][0]
    assert bytes(choice["token_ids"]).decode() == choice["text"]
    assert choice["prompt_token_ids"] == [97, 98]


def test_a_prompt_is_truncated_on_the_side_that_the_request_names():
    left, right = answers(
        body("abcdef", truncate_prompt_tokens=2, return_token_ids=True),
        body("abcdef", truncate_prompt_tokens=2, truncation_side="right", return_token_ids=True),
    )
    assert [each["choices"][0]["prompt_token_ids"] for each in (left, right)] == [[101, 102], [97, 98]]


def test_sampling_defaults_of_the_model_set_the_limit_of_chats():
    asked = {"messages": [{"role": "user", "content": "hi"}], "ignore_eos": True}
    [answer] = answers(asked, path="/v1/chat/completions", api=ApiConfig(sampling_defaults={"max_tokens": 5}))
    assert answer["usage"]["completion_tokens"] == 5


def test_an_answer_has_the_first_of_the_names_that_its_model_is_served_by():
    found = answers(body(model="b"), body(model="c"), served_model_names=("a", "b"))
    assert found[0]["model"] == "a"
    assert (found[1]["error"]["code"], found[1]["error"]["type"]) == (404, "NotFoundError")


def test_the_times_of_a_request_are_those_of_the_engine():
    timing = TimingConfig(speedup_ratio=1.0)
    [answer] = answers(body(max_tokens=5), api=ApiConfig(enable_per_request_metrics=True), timing=timing)
    times = answer["metrics"]
    assert times["queue_time_ms"] >= 0 and times["time_to_first_token_ms"] > 0
    assert times["mean_itl_ms"] * 4 == pytest.approx(times["generation_time_ms"])


def test_a_large_request_is_read_in_another_process_as_a_small_one_is():
    large = {"prompt": "x" * 200_000, "model": "b", "unknown": {"a": 1}}
    [answer] = answers(large, served_model_names=("a", "b"))
    assert answer["error"]["param"] in ("input_text", "input_tokens")
