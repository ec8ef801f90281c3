"""One request, however strange, does not keep the others waiting: its work is bounded, or done elsewhere."""

import asyncio
import random
import threading
from collections import Counter
from itertools import pairwise, product

import pytest

from serving.engines.mock.answers import words as mock_words
from serving.engines.mock.answers.author import Author
from serving.engines.mock.answers.words import repetition_place, without
from serving.frontend.api.errors import ApiError
from serving.frontend.generation import choice, start
from serving.model.template import ChatTemplate
from serving.stand_in.config import ApiConfig
from tests.stand_in.support import running


def ask(*bodies, path="/v1/completions", **settings):
    """Send requests one after the other; return their answers."""

    async def all_of_them():
        async with running(**settings) as client:
            return [await client.post(path, json=body) for body in bodies]

    return asyncio.run(all_of_them())


def test_a_template_of_a_request_is_not_rendered_by_the_server_itself(monkeypatch):
    rendered, render = [], ChatTemplate.render
    monkeypatch.setattr(
        ChatTemplate, "render", lambda self, *args, **more: rendered.append(more) or render(self, *args, **more)
    )
    chat = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 4}
    own = chat | {"chat_template": "{{ messages[0].content }}!"}
    api = ApiConfig(trust_request_chat_template=True)
    first, second = ask(own, chat, path="/v1/chat/completions", api=api)
    assert first.json()["usage"]["prompt_tokens"] == len("hello!")
    assert second.status_code == 200
    assert [more["template"] for more in rendered] == [""]


def plain_place(output, least, most, count):
    """Look at the end of every beginning of an answer, as vLLM does at each step."""
    for end in range(1, len(output) + 1):
        for size in range(max(least, 1), most + 1):
            tail = output[max(end - size * count, 0) : end]
            if len(tail) == size * count and tail == tail[:size] * count:
                return end
    return None


def test_repetitions_end_an_answer_where_looking_at_every_step_would():
    for output in product("ab", repeat=9):
        tokens = [ord(letter) for letter in output]
        for pattern in ((0, 4, 2), (1, 3, 3), (2, 4, 2), (3, 9, 2), (2, 2, 4)):
            assert repetition_place(tokens, pattern) == plain_place(tokens, *pattern), (output, pattern)


def test_repetitions_of_chance_end_an_answer_where_looking_at_every_step_would():
    rng = random.Random(7)
    for _ in range(300):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(60))]
        pattern = (rng.randrange(8), rng.randrange(8, 30), rng.randrange(2, 5))
        assert repetition_place(tokens, pattern) == plain_place(tokens, *pattern), (tokens, pattern)


def test_a_search_for_thousands_of_patterns_reads_an_answer_about_once_for_each(monkeypatch):
    looked_at, start = [], mock_words._run_start
    monkeypatch.setattr(mock_words, "_run_start", lambda a, b: looked_at.append(len(a)) or start(a, b))
    rng = random.Random(7)
    tokens = [rng.randrange(256) for _ in range(20_000)]
    sizes = range(3, 8_000)
    assert repetition_place(tokens, (sizes[0], sizes[-1], 2)) is None
    assert 0 < len(looked_at) < len(tokens)
    assert sum(looked_at) < len(tokens) * len(sizes) / 100


def test_thousands_of_bad_words_are_looked_up_not_compared():
    class Banned(tuple):
        num_compared = 0

        def __eq__(self, other):
            Banned.num_compared += 1
            return tuple.__eq__(self, other)

        __hash__ = tuple.__hash__

        def __getitem__(self, place):
            found = tuple.__getitem__(self, place)
            return Banned(found) if isinstance(place, slice) else found

    banned = [Banned((first, second)) for first in range(100) for second in range(90)]
    output = [5, 7] * 250
    kept = without(output, banned, range(100))
    assert all(not (first < 100 and second < 90) for first, second in pairwise(kept))
    assert Banned.num_compared < len(banned) + 2 * len(output)


@pytest.mark.parametrize(
    "more",
    [
        {"bad_words": ["e", "th"]},
        {"repetition_detection": {"max_pattern_size": 20, "min_pattern_size": 1, "min_count": 2}},
    ],
)
def test_an_answer_that_is_searched_is_made_up_beside_the_event_loop(monkeypatch, more):
    threads, plan = [], Author.plan
    monkeypatch.setattr(
        Author, "plan", lambda *args, **named: threads.append(threading.current_thread()) or plan(*args, **named)
    )
    plain = {"prompt": "hello", "max_tokens": 30}
    assert [each.status_code for each in ask(plain, plain | more)] == [200, 200]
    assert [each is threading.main_thread() for each in threads] == [True, False]


@pytest.mark.parametrize("asked", [{"prompt": "a", "n": 300}, {"prompt": ["a"] * 100, "n": 3}])
def test_hundreds_of_answers_are_started_a_few_in_a_turn_of_the_event_loop(monkeypatch, asked):
    num_turns, turns, plan = 0, Counter(), Author.plan

    def planned(*args, **named):
        turns[num_turns] += 1
        return plan(*args, **named)

    async def counted():
        nonlocal num_turns
        while True:
            num_turns += 1
            await asyncio.sleep(0)

    async def all_of_it():
        async with running() as client:
            counting = asyncio.create_task(counted())
            answer = await client.post("/v1/completions", json=asked | {"max_tokens": 1})
            counting.cancel()
            return answer.json()

    monkeypatch.setattr(Author, "plan", planned)
    answer = asyncio.run(all_of_it())
    assert [each["index"] for each in answer["choices"]] == list(range(300))
    assert sum(turns.values()) == 300
    assert max(turns.values()) <= 64


def test_of_hundreds_of_answers_of_which_one_cannot_start_none_goes_on(monkeypatch):
    started, closed, begin, close = [], [], start._start, choice.Choice.close

    def started_until(*args, **named):
        if len(started) == 100:
            raise ApiError(503, "no more")
        started.append(begin(*args, **named))
        return started[-1]

    monkeypatch.setattr(start, "_start", started_until)
    monkeypatch.setattr(choice.Choice, "close", lambda self: closed.append(self) or close(self))
    [answer] = ask({"prompt": "a", "max_tokens": 1, "n": 300})
    assert answer.status_code == 503
    assert len(started) == 100 and closed == started
