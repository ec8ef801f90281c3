"""OpenAI servers as workers, by URL: the adapter against a stand-in that is true to vLLM's sources, and against strange ones."""

import asyncio
import contextlib
import time

import httpx
import pytest
import uvloop

from serving.engines.openai import engine as adapter
from serving.engines.openai.engine import OpenAiServer
from serving.engines.openai.url import root
from serving.life.lease import LeaseConfig
from serving.model.files import ModelFiles
from serving.runtime.messages import CallError
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from serving.worker.loop import run_worker
from tests.engines.test_gpu_engines import request
from tests.support.apart import apart
from tests.support.commands import dynamo_run
from tests.support.model import write_model
from tests.support.vllm_server import HELD, MAX_LEN, VllmServer, strange
from tests.support.waiting import in_time, until_async

FILES = ModelFiles({})


def made(url, role="aggregated", run=None, more=None, lease=None, **worker):
    settings = WorkerConfig(**({"model_path": "m", "role": role} | worker))
    return OpenAiServer(url, settings, ModelRunConfig(**(run or {})), more or {}, lease=LeaseConfig(**(lease or {})))


@contextlib.asynccontextmanager
async def started(url, role="aggregated", **options):
    engine = made(url, role, **options)
    try:
        await engine.start(FILES)
        yield engine
    finally:
        await engine.close()


def in_a_loop(main):
    async def timed():
        async with in_time():
            await main()

    uvloop.run(timed())


def with_server(talk, **options):
    """Run `talk(server, engine)`."""

    async def main():
        async with VllmServer(**options) as server, started(server.url) as engine:
            await talk(server, engine)

    in_a_loop(main)


def with_pair(talk):
    """Run `talk(servers, engines)` with a server and a worker of each role, prefill first."""

    async def main():
        async with (
            VllmServer() as first,
            VllmServer() as second,
            started(first.url, "prefill") as prefill,
            started(second.url, "decode") as decode,
        ):
            await talk((first, second), (prefill, decode))

    in_a_loop(main)


async def items_of(engine, *asked, **more):
    return [item async for item in engine.generate(request(*asked, **more))]


def tokens_of(items):
    return [token for item in items for token in (item if isinstance(item, list) else item["token_ids"])]


def test_an_answer_comes_token_by_token_with_its_reason_and_what_was_cached():
    async def talk(server, engine):
        assert await items_of(engine, [10, 20, 30], 4) == [
            [11],
            [21],
            [31],
            {"token_ids": [11], "finish_reason": "length", "cached_tokens": 0},
        ]
        items = await items_of(engine, [10, 1, 30] * 6, 9)
        assert tokens_of(items) == [11, 2]
        assert items[-1]["finish_reason"] == "stop"
        assert items[-1]["cached_tokens"] == 16
        assert (engine.traits.context_length, engine.traits.block_size) == (MAX_LEN, 16)
        assert not engine.traits.has_kv_events

    with_server(talk)


def test_what_is_asked_for_is_asked_of_the_server():
    async def talk(server, engine):
        conditions = {"min_tokens": 3, "ignore_eos": True}
        options = {"temperature": 0.5, "top_k": 4, "seed": 7, "logit_bias": {"5": 1.5}, "unknown": 1}
        await items_of(engine, [10, 1], 4, stop_conditions=conditions, sampling_options=options)
        [asked] = server.asked
        assert asked.pop("request_id").startswith("r-")
        assert asked == {
            "model": "served",
            "prompt": [10, 1],
            "max_tokens": 4,
            "min_tokens": 3,
            "ignore_eos": True,
            "stop_token_ids": [],
            "temperature": 0.5,
            "top_k": 4,
            "seed": 7,
            "logit_bias": {"5": 1.5},
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }
        await items_of(engine, [10, 1], None, eos_token_ids=[2, 9])
        assert server.asked[-1]["max_tokens"] == MAX_LEN - 2
        assert server.asked[-1]["stop_token_ids"] == [2, 9]

    with_server(talk)


@pytest.mark.parametrize("guided", [{"json": {"type": "object"}}, {"choice": ["a", "b"]}])
def test_what_an_answer_must_look_like_is_passed_on_to_vllm(guided):
    async def talk(server, engine):
        assert engine.traits.guided_decoding == ("json", "regex", "choice", "grammar")
        [item async for item in engine.generate(request([10], 1, sampling_options={"guided_decoding": guided}))]
        assert server.asked[0]["structured_outputs"] == guided

    with_server(talk)


def test_a_server_that_may_ignore_what_an_answer_must_look_like_is_not_asked():
    async def main():
        async def answer(reader, writer):
            raise AssertionError("it should not have been asked")

        async with strange(answer) as url, started(url) as engine:
            assert engine.traits.guided_decoding == ()
            with pytest.raises(CallError, match="cannot guide answers by regex"):
                [
                    item
                    async for item in engine.generate(
                        request([10], sampling_options={"guided_decoding": {"regex": "a"}})
                    )
                ]

    in_a_loop(main)


def test_more_fields_of_each_request_come_from_the_user():
    async def main():
        async with VllmServer() as server, started(server.url, more={"priority": 3}) as engine:
            await items_of(engine, [10], 1)
            assert server.asked[0]["priority"] == 3

    in_a_loop(main)


def test_log_probabilities_come_with_the_tokens_and_the_prompts_in_an_answer_that_is_not_streamed():
    async def talk(server, engine):
        items = await items_of(engine, [10, 20], 2, sampling_options={"logprobs": 1})
        assert items[0] == {"token_ids": [11], "log_probs": [-0.5], "top_logprobs": [[[11, -0.5], [12, -1.5]]]}
        [item] = await items_of(engine, [10, 20, 30], 2, sampling_options={"logprobs": 0, "prompt_logprobs": 1})
        assert item["token_ids"] == [11, 21]
        assert item["log_probs"] == [-0.5, -0.5]
        assert item["prompt_log_probs"] == [None, -1.0, -1.0]
        assert item["prompt_top_logprobs"] == [None, [[20, -1.0], [21, -2.0]], [[30, -1.0], [31, -2.0]]]
        assert (item["finish_reason"], item["cached_tokens"]) == ("length", 0)

    with_server(talk)


def test_a_server_that_gives_no_token_ids_is_passed_on_as_text():
    async def talk(server, engine):
        items = await items_of(engine, [10, 20], 2, sampling_options={"logprobs": 1})
        assert [item["text"] for item in items] == ["<11>", "<21>"]
        assert bytes(items[0]["token_ids"]) == b"<11>"  # without a tokenizer.json tokens are bytes
        assert items[0]["top_logprobs"][0][1] == {"token": "<12>", "logprob": -1.5, "bytes": [*b"<12>"]}
        assert (items[-1]["finish_reason"], items[-1]["completion_tokens"]) == ("length", 2)

    with_server(talk, ids=False)


def test_a_prompt_is_prefilled_by_one_server_and_its_answer_said_by_another():
    async def talk(servers, engines):
        [last] = await items_of(engines[0], [10, 20] * 10, 4, kv_transfer_params={"do_remote_decode": True})
        assert (last["token_ids"], last["finish_reason"], last["cached_tokens"]) == ([], "length", 16)
        asked = servers[0].asked[0]
        assert (asked["stream"], asked["max_tokens"], "stream_options" in asked) == (False, 1, False)
        params = last["kv_transfer_params"]
        assert params["remote_engine_id"] == servers[0].engine_id
        items = await items_of(engines[1], [10, 20] * 10, 4, kv_transfer_params=params)
        assert tokens_of(items) == [11, 21, 11, 21]
        assert servers[1].num_read == 1
        assert "lease_end" not in servers[1].asked[0]["kv_transfer_params"]

    with_pair(talk)


def test_a_server_is_not_told_of_kv_that_may_be_gone():
    async def talk(servers, engines):
        [last] = await items_of(engines[0], [10, 20], 4)
        params = last["kv_transfer_params"] | {"lease_end": time.time() + 1}
        assert tokens_of(await items_of(engines[1], [10, 20], 4, kv_transfer_params=params)) == [11, 21, 11, 21]
        assert "kv_transfer_params" not in servers[1].asked[0]

    with_pair(talk)


def test_a_server_keeps_kv_for_as_long_as_its_worker_was_told():
    async def main():
        lease = {"kv_lease_duration_s": 6000.0}
        async with (
            VllmServer() as first,
            VllmServer() as second,
            started(first.url, "prefill", lease=lease) as prefill,
            started(second.url, "decode", lease=lease) as decode,
        ):
            for passed_s in (3000, 5000):
                [last] = await items_of(prefill, [10, 20], 4)
                params = last["kv_transfer_params"]
                later = params | {"lease_end": params["lease_end"] - passed_s}
                await items_of(decode, [10, 20], 4, kv_transfer_params=later)
            assert ["kv_transfer_params" in asked for asked in second.asked] == [True, False]

    in_a_loop(main)


@pytest.mark.parametrize("options", [{}, {"prompt_logprobs": 0}])
def test_kv_that_did_not_come_is_a_lost_call(options):
    async def talk(servers, engines):
        [last] = await items_of(engines[0], [10, 20], 4)
        HELD.clear()
        with pytest.raises(CallError, match=r"Internal server error.*did not arrive") as failed:
            await items_of(
                engines[1], [10, 20], 4, kv_transfer_params=last["kv_transfer_params"], sampling_options=options
            )
        assert failed.value.kind == "lost"

    with_pair(talk)


def test_a_server_without_a_connector_is_no_prefill_worker():
    async def main():
        async with VllmServer(connects=False) as server, started(server.url, "prefill") as engine:
            with pytest.raises(CallError, match="started without --kv-transfer-config") as failed:
                await items_of(engine, [10, 20], 4)
            assert failed.value.kind == "engine"

    in_a_loop(main)


def test_leaving_early_aborts_the_request_at_the_server():
    async def talk(server, engine):
        server.stops_after = 1
        answer = engine.generate(request([10, 20], 9))
        assert await anext(answer) == [11]
        await answer.aclose()
        await until_async(lambda: server.num_aborted == 1 and not server.num_running)
        server.stops_after = None
        assert tokens_of(await items_of(engine, [10, 20], 2)) == [11, 21]
        assert server.num_aborted == 1

    with_server(talk)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid"),
        (422, "invalid"),
        (401, "engine"),
        (404, "engine"),
        (429, "overloaded"),
        (503, "overloaded"),
        (500, "engine"),
        (502, "engine"),
    ],
)
def test_errors_are_told_by_their_kind_in_the_servers_words(status, kind):
    async def talk(server, engine):
        server.status = status
        with pytest.raises(CallError, match=f"{server.url}: HTTP {status}: It is as the test says.") as failed:
            await items_of(engine, [10], 1)
        assert failed.value.kind == kind

    with_server(talk)


def test_a_prompt_that_is_too_long_is_invalid_in_the_servers_words():
    async def talk(server, engine):
        with pytest.raises(CallError, match=r"maximum context length is 4096 tokens") as failed:
            await items_of(engine, [10] * MAX_LEN, 1)
        assert failed.value.kind == "invalid"

    with_server(talk)


HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
EVENTS = HEAD + b"Connection: close\r\n\r\n"
WHOLE = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n\r\n"
PIECE = b'data: {"choices": [{"token_ids": [5], "text": "x"}]}\n\n'


def says(*parts, forever=b""):
    async def answer(reader, writer):
        for part in parts:
            writer.write(part)
        await writer.drain()
        while forever:
            writer.write(forever)
            await writer.drain()

    return answer


STRANGE = {
    "nothing": (says(), "the connection broke", "lost"),
    "no HTTP": (says(b"SSH-2.0-OpenSSH\r\n"), "", "engine"),
    "a head without an end": (says(b"HTTP/1.1 200 OK\r\n", forever=b"X-A: " + b"x" * 1000 + b"\r\n"), "", "engine"),
    "a header line without an end": (says(b"HTTP/1.1 200 OK\r\nX-A: ", forever=b"x" * 1000), "", "engine"),
    "a redirect": (says(b"HTTP/1.1 307 T\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n"), "redirects are not followed", "engine"),
    "another type": (says(WHOLE, b"{}"), "expected an answer of type text/event-stream, not application/json", "engine"),
    "no event": (says(EVENTS), "the answer broke off", "lost"),
    "no end": (says(EVENTS, PIECE), "the answer broke off", "lost"),
    "an early end": (says(EVENTS, PIECE, b"data: [DONE]\n\n"), "the answer broke off", "lost"),
    "a broken chunk": (says(HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n"), "does not speak HTTP", "engine"),
    "a chunk without an end": (says(HEAD + b"Transfer-Encoding: chunked\r\n\r\n", forever=b"1" * 1000), "does not speak HTTP", "engine"),
    "half a chunk": (says(HEAD + b"Transfer-Encoding: chunked\r\n\r\nff\r\nabc"), "the connection broke", "lost"),
    "a line without an end": (says(EVENTS + b"data: ", forever=b"x" * 65536), "an event has more than 1,048,592 bytes", "engine"),
    "no JSON": (says(EVENTS + b"data: <html>\n\n"), "not an answer of an OpenAI server", "engine"),
    "no UTF-8": (says(EVENTS + b'data: {"choices": [{"text": "\xff"}]}\n\n'), "not an answer of an OpenAI server", "engine"),
    "deep JSON": (says(EVENTS + b'data: {"x": ' + b"[" * 100_000 + b"\n\n"), "not an answer of an OpenAI server", "engine"),
    "deep parameters": (
        says(EVENTS + b'data: {"kv_transfer_params": {"x": ' + b"[" * 100_000 + b"\n\n"),
        "not an answer of an OpenAI server",
        "engine",
    ),
    "another type of JSON": (says(EVENTS + b'data: [{"choices": []}]\n\n'), "Expected `object`, got `array`", "engine"),
    "choices of another type": (says(EVENTS + b'data: {"choices": {"a": 1}}\n\n'), "Expected `array`, got `object`", "engine"),
    "tokens of another type": (says(EVENTS + b'data: {"choices": [{"token_ids": ["a"]}]}\n\n'), "Expected `int`, got `str`", "engine"),
    "tokens that cannot be": (says(EVENTS + b'data: {"choices": [{"token_ids": [-1]}]}\n\n'), "Expected `int` >= 0", "engine"),
    "too few log-probabilities": (
        says(EVENTS + b'data: {"choices": [{"token_ids": [5], "logprobs": {"token_logprobs": [-1, -2], "top_logprobs": [{}, {}]}}]}\n\n'),
        "log-probabilities of 2 tokens",
        "engine",
    ),
    "an error in the stream": (
        says(EVENTS + b'data: {"error": {"message": "no", "code": 400}}\n\n'),
        "HTTP 400: no",
        "invalid",
    ),
    "an error that is a text": (says(EVENTS + b'data: {"error": "no"}\n\n'), "HTTP 500: no", "engine"),
    "giving it up": (says(EVENTS + PIECE.replace(b'"text"', b'"finish_reason": "abort", "text"')), "aborted", "lost"),
    "an error without an end": (says(b"HTTP/1.1 400 Bad\r\n\r\n", forever=b"x" * 65536), "HTTP 400", "invalid"),
    "an error without a body": (says(b"HTTP/1.1 400 Bad\r\nContent-Length: 0\r\n\r\n"), "HTTP 400", "invalid"),
    "an error of deep JSON": (says(b"HTTP/1.1 400 Bad\r\nConnection: close\r\n\r\n" + b"[" * 100_000), "HTTP 400", "invalid"),
}  # fmt: skip


@pytest.mark.parametrize(("answer", "problem", "kind"), STRANGE.values(), ids=STRANGE)
def test_a_strange_server_ends_the_request_with_one_error(answer, problem, kind):
    async def main():
        async with strange(answer) as url, started(url) as engine:
            with pytest.raises(CallError) as failed:
                await items_of(engine, [10], 4)
            assert str(failed.value).startswith(url)
            assert problem in str(failed.value)
            assert len(str(failed.value)) < 1000
            assert "\n" not in str(failed.value)
            assert failed.value.kind == kind

    in_a_loop(main)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (says(WHOLE, forever=b"x" * 65536), "the answer has more than 1,048,592 bytes"),
        (says(WHOLE, b"{}"), "the answer has no choices"),
        (says(WHOLE, b'{"error": "no"}'), "HTTP 500: no"),
        (says(WHOLE, b'{"choices": [{"text": ""}]}'), "does not say where the KV is"),
        (
            says(WHOLE, b'{"choices": [{"text": ""}], "kv_transfer_params": [1]}'),
            "Expected `object | null`, got `array`",
        ),
    ],
)
def test_a_strange_prefill_server_ends_the_request_with_one_error(answer, problem):
    async def main():
        async with strange(answer) as url, started(url, "prefill") as engine:
            with pytest.raises(CallError, match=problem.replace("|", r"\|")) as failed:
                await items_of(engine, [10], 4)
            assert failed.value.kind == "engine"

    in_a_loop(main)


def test_the_end_of_an_answer_does_not_wait_for_what_never_follows(monkeypatch):
    monkeypatch.setattr(adapter, "LAST_S", 0.01)

    async def never(reader, writer):
        writer.write(EVENTS + PIECE.replace(b'"text"', b'"finish_reason": "stop", "text"'))
        await reader.read()

    async def main():
        async with strange(never) as url, started(url) as engine:
            assert await items_of(engine, [10], 4) == [{"token_ids": [5], "finish_reason": "stop"}]

    in_a_loop(main)


def test_an_answer_that_is_whole_is_kept_whatever_comes_after_it():
    ended = PIECE.replace(b'"text"', b'"finish_reason": "stop", "text"')

    async def main():
        async with strange(says(EVENTS + ended + b'data: {"usage": "much"}\n\n')) as url, started(url) as engine:
            assert await items_of(engine, [10], 4) == [{"token_ids": [5], "finish_reason": "stop"}]

    in_a_loop(main)


def test_nobody_there_is_said_at_the_start():
    async def main():
        async with VllmServer() as server:
            url = server.url
        with pytest.raises(EngineError, match=f"{url} cannot be reached: .*expected an OpenAI server there"):
            async with started(url):
                pass

    in_a_loop(main)


def test_a_model_is_chosen_by_its_name_or_is_the_only_one():
    async def main():
        async with VllmServer("a", "b") as server:
            with pytest.raises(EngineError, match=r"several models or none \(a, b\): choose one with --model-name"):
                async with started(server.url):
                    pass
            async with started(server.url + "/v1/", model_name="b") as engine:
                await items_of(engine, [10], 1)
                assert server.asked[0]["model"] == "b"

    in_a_loop(main)


def test_the_key_comes_from_the_environment(monkeypatch):
    async def main():
        async with VllmServer(key="secret") as server:
            with pytest.raises(EngineError, match="HTTP 401: Unauthorized"):
                async with started(server.url):
                    pass
            monkeypatch.setenv("OPENAI_API_KEY", "secret")
            async with started(server.url) as engine:
                await items_of(engine, [10], 1)
            assert server.headers[0]["Authorization"] == "Bearer secret"

    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    in_a_loop(main)


def test_a_server_that_goes_ends_the_worker_and_the_requests_that_wait_for_it(monkeypatch):
    monkeypatch.setattr(adapter, "CHECK_S", 0.01)
    hung = asyncio.Event()

    async def hangs(reader, writer):
        hung.set()
        await reader.read()

    async def main():
        async with VllmServer() as server, strange(hangs) as waiting, started(server.url) as engine:
            engine._root, watched = waiting, engine._root
            asked = asyncio.create_task(items_of(engine, [10], 4))
            await hung.wait()
            engine._root = watched
            watching = asyncio.create_task(engine.failed())
            await server.__aexit__()
            with pytest.raises(EngineError, match=f"{watched} no longer answers"):
                await watching
            await engine.close()
            with pytest.raises(CallError, match="the connection broke") as failed:
                await asked
            assert failed.value.kind == "lost"
            with pytest.raises(CallError, match="is gone") as failed:
                await items_of(engine, [10], 4)
            assert failed.value.kind == "draining"

    in_a_loop(main)


def test_a_request_that_a_server_never_had_goes_elsewhere():
    async def main():
        async with VllmServer() as server, started(server.url) as engine:
            await server.__aexit__()
            with pytest.raises(CallError, match="cannot be reached") as failed:
                await items_of(engine, [10], 4)
            assert failed.value.kind == "draining"

    in_a_loop(main)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://h:8000", "http://h:8000"),
        ("http://h:8000/", "http://h:8000"),
        ("http://h:8000/v1", "http://h:8000"),
        ("https://h/v1/", "https://h"),
        ("http://[::1]:8000/behind/v1", "http://[::1]:8000/behind"),
    ],
)
def test_the_v1_that_clients_are_given_may_be_there(url, expected):
    assert root(url) == expected


@pytest.mark.parametrize(
    "url", ["h:8000", "ftp://h", "http://", "http://h:0", "http://h:99999", "http://h:x", "http://h?x=1", "http://u:p@h", "http://h h"]
)  # fmt: skip
def test_what_is_no_url_of_a_server_is_refused(url):
    with pytest.raises(ValueError, match=r"expected http|the key is read from the environment \(OPENAI_API_KEY\)"):
        root(url)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["out=http://127.0.0.1:8000"], "out=http://127.0.0.1:8000 needs a model"),
        (["out=http://127.0.0.1:8000", "m", "--tensor-parallel-size", "2"], "does not use --tensor-parallel-size"),
        (["out=http://u@127.0.0.1:8000", "m"], "OPENAI_API_KEY"),
        (
            ["in=http", "out=http://127.0.0.1:8000", "m", "--role", "decode"],
            "--role decode is for workers on the network",
        ),
        (
            ["in=dyn://", "out=http://h:8000", "m", "--role", "decode", "--no-kv-lease-renewal"],
            "out=http://h:8000 has no use for --no-kv-lease-renewal",
        ),
        (
            ["in=dyn://", "out=http://h:8000", "m", "--kv-lease-duration-s", "60"],
            "--kv-lease-duration-s is for out=mocker and out=http://... with --role prefill or decode",
        ),
        (
            ["in=dyn://", "out=vllm", "m", "--role", "prefill", "--kv-lease-duration-s", "60"],
            "--kv-lease-duration-s is for out=mocker and out=http://... with --role prefill or decode",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(words, message):
    done = dynamo_run(*words)
    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert done.stderr.count("\n") == 1


def test_a_call_is_shown():
    done = dynamo_run(
        "in=dyn://", "out=http://127.0.0.1:8000/v1", "m", "--role", "prefill", "--dry-run", "--", "--priority", "1"
    )
    assert done.stdout == "POST http://127.0.0.1:8000/v1/completions(\n    priority=1,\n)\n"


def test_our_frontend_drives_a_prefill_and_a_decode_server(tmp_path):
    folder = write_model(tmp_path / "model")
    servers = {"prefill": VllmServer(), "decode": VllmServer()}

    async def work(network, role, stopping):
        component = "prefill" if role == "prefill" else "backend"
        settings = {"endpoint": f"dyn://apart.{component}.generate", "model_name": "apart", "model_path": str(folder)}
        worker = WorkerConfig(role=role, drain_s=5.0, **settings)
        await run_worker(network, worker, OpenAiServer(servers[role].url, worker, ModelRunConfig(), {}), stopping)

    with apart(tmp_path / "discovery") as stack:

        async def start(role):
            await servers[role].__aenter__()
            stopping = asyncio.Event()
            stack._running[role] = asyncio.create_task(work(stack._network, role, stopping)), stopping

        for role in servers:
            stack.do(start(role))
        try:
            stack.until_there(2)
            body = {
                "model": "apart",
                "prompt": "the quick brown fox",
                "max_tokens": 4,
                "nvext": {"extra_fields": ["worker_id"]},
            }
            answer = httpx.post(f"{stack.url}/v1/completions", json=body, timeout=60)
            assert answer.status_code == 200, answer.text
            workers = answer.json()["nvext"]["worker_id"]
            assert workers["prefill_worker_id"] != workers["decode_worker_id"]
            assert answer.json()["usage"]["completion_tokens"] == 4
            assert servers["decode"].num_read == 1
        finally:
            for server in servers.values():
                stack.do(server.__aexit__())
