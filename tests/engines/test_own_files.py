"""`out=pystr:FILE` and `out=pytok:FILE`: engines in a file of the user's."""

import asyncio
import json
import re
import signal
import subprocess
import threading

import httpx
import pytest
import uvloop

from serving.engines.own import CAPACITY, OwnEngine
from serving.model.files import ModelFiles
from serving.runtime.messages import CallError
from serving.runtime.world import SeededWorld, World, within
from serving.worker.config import ModelRunConfig, WorkerConfig
from serving.worker.engine import EngineError
from tests.support import warm
from tests.support.commands import DYNAMO_RUN, dynamo_run
from tests.support.model import write_model
from tests.support.servers import free_port
from tests.support.waiting import PATIENCE_S, in_time, until_async, wait_for

GUIDE = """
import asyncio, sys

async def generate(request):
    for word in ("The", " capital", " of", " France", " is", " Paris", "."):
        yield {"id":"1","choices":[{"index":0,"delta":{"content":word,"role":"assistant"}}],"created":1841762283,"model":"Llama-3.2-3B-Instruct","system_fingerprint":"local","object":"chat.completion.chunk"}
        await asyncio.sleep(0.001)
    yield {"id":"1","choices":[{"index":0,"delta":{"content":"","role":"assistant"},"finish_reason":"stop"}],"created":1841762283,"model":"Llama-3.2-3B-Instruct","system_fingerprint":"local","object":"chat.completion.chunk"}

if __name__ == "__main__":
    print(f"MAIN: {sys.argv}")
"""


QUESTION = "What is the capital?"


def engine(tmp_path, source, kind="pystr", **worker):
    path = tmp_path / "engine.py"
    path.write_text(source)
    return OwnEngine(kind, str(path), WorkerConfig(**worker), ModelRunConfig(), [], http_port=8080)


def with_engine(made, talk):
    async def main():
        try:
            await made.start(ModelFiles({}))
            async with in_time():
                return await talk()
        finally:
            await made.close()

    return uvloop.run(main())


@pytest.fixture(params=[World(), SeededWorld(1, "worker")], ids=["in its own thread", "in virtual time"])
def anywhere(request):
    with within(request.param):
        yield


def test_the_guides_text_engine_answers_and_sees_its_arguments(tmp_path):
    (tmp_path / "my_engine.py").write_text(GUIDE)
    model = write_model(tmp_path / "Llama-3.2-3B-Instruct")
    flags = ["--model-name", "llama3.2", "--tensor-parallel-size", "4", "--", "-n", "1"]
    done = dynamo_run("out=pystr:my_engine.py", model, *flags, input=QUESTION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    main, answer = done.stdout.splitlines()
    assert main == (
        f"MAIN: ['my_engine.py', '--model-path', '{model}', '--model-name', 'llama3.2', '--http-port', '8080', "
        "'--tensor-parallel-size', '4', '--base-gpu-id', '0', '--num-nodes', '1', '--node-rank', '0', '-n', '1']"
    )
    assert answer == "The capital of France is Paris."


def test_flags_that_were_given_are_among_the_arguments(tmp_path):
    (tmp_path / "e.py").write_text(GUIDE)
    (tmp_path / "x.json").write_text("{}")
    flags = ["--model-config", "c", "--leader-addr", "h:1", "--extra-engine-args", "x.json"]
    done = dynamo_run(
        "out=pystr:e.py", *flags, "--dry-run", "--", "--custom-arg", "Orange", "--yes", input=QUESTION, cwd=tmp_path
    )
    assert done.stdout.count("'--model-config', 'c', '--leader-addr', 'h:1', '--extra-engine-args', 'x.json'") == 1
    assert "'--custom-arg', 'Orange', '--yes']" in done.stdout


def test_the_guides_token_engine_gets_the_guides_request(tmp_path):
    source = """
import json
async def generate(request):
    print(json.dumps(request))
    for token in request["token_ids"][:3]:
        yield {"token_ids":[token],"tokens":None,"text":None,"cum_log_probs":None,"log_probs":None,"finish_reason":None}
"""
    (tmp_path / "tok.py").write_text(source)
    model = write_model(tmp_path / "model")
    done = dynamo_run("out=pytok:tok.py", "--model-path", model, "--max-tokens", "50", input=QUESTION, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    request = json.loads(done.stdout.splitlines()[0])
    guides = ("token_ids", "stop_conditions", "sampling_options", "eos_token_ids", "mdc_sum", "annotations")
    assert request.keys() >= {*guides}
    assert (
        request["stop_conditions"]
        | {
            "max_tokens": 50,
            "stop": None,
            "stop_token_ids_hidden": request["eos_token_ids"],
            "min_tokens": None,
            "ignore_eos": None,
        }
        == request["stop_conditions"]
    )
    assert request["sampling_options"]["temperature"] == 0.7
    assert set(request["sampling_options"]) >= {"n", "best_of", "top_k", "use_beam_search", "length_penalty", "seed"}


@pytest.mark.usefixtures("anywhere")
def test_the_file_is_run_once_and_beside_its_neighbours(tmp_path):
    (tmp_path / "neighbour.py").write_text("WORD = 'hello'")
    source = """
import neighbour
count = 0
def initialize(arguments):
    global count
    count += 1
async def generate(request):
    yield {"choices": [{"index": 0, "delta": {"content": f"{neighbour.WORD} {count}"}}]}
"""
    made = engine(tmp_path, source)

    async def talk():
        return [[item async for item in made.generate({})] for _ in range(2)]

    first, second = with_engine(made, talk)
    assert first == second
    assert first[0]["choices"][0]["delta"]["content"] == "hello 1"


@pytest.mark.usefixtures("anywhere")
def test_an_exception_is_that_requests_error_alone(tmp_path):
    made = engine(tmp_path, "async def generate(request):\n    yield {'choices': []}\n    1 / request['by']")

    async def talk():
        with pytest.raises(CallError, match=r"a python exception was caught .*ZeroDivisionError: division by zero"):
            [item async for item in made.generate({"by": 0})]
        return [item async for item in made.generate({"by": 1})]

    assert with_engine(made, talk) == [{"choices": []}]


@pytest.mark.parametrize("item", ["'text'", "{}", "{'choices': 1}", "None", "[1]"])
def test_what_is_no_response_is_named(tmp_path, item):
    made = engine(tmp_path, f"async def generate(request):\n    yield {item}")

    async def talk():
        with pytest.raises(CallError, match="invalid response object"):
            [item async for item in made.generate({})]

    with_engine(made, talk)


def test_an_engine_that_blocks_holds_up_nobody_but_itself(tmp_path):
    source = """
import pathlib
async def generate(request):
    pathlib.Path(request["blocks"]).touch()
    while not pathlib.Path(request["goes_on"]).exists():
        pass
    yield {"choices": []}
"""
    made = engine(tmp_path, source)
    blocks, goes_on = tmp_path / "blocks", tmp_path / "goes on"

    async def talk():
        answer = asyncio.create_task(anext(made.generate({"blocks": str(blocks), "goes_on": str(goes_on)})))
        await until_async(blocks.exists)
        for _ in range(20):
            await asyncio.sleep(0)
        assert not answer.done()
        goes_on.touch()
        return await answer

    assert with_engine(made, talk) == {"choices": []}


@pytest.mark.usefixtures("anywhere")
def test_nobody_waits_for_a_generator_that_was_left(tmp_path):
    source = """
import asyncio
async def generate(request):
    try:
        while True:
            yield {"choices": [], "n": 1}
            await asyncio.sleep(0.001)
    finally:
        open(request["file"], "w").close()
"""
    made = engine(tmp_path, source)
    mark = tmp_path / "closed"

    async def talk():
        answer = made.generate({"file": str(mark)})
        await anext(answer)
        await answer.aclose()
        await until_async(mark.exists)

    with_engine(made, talk)


def test_in_virtual_time_an_engine_runs_in_the_servers_thread_and_loop(tmp_path):
    source = """
import asyncio, threading
async def generate(request):
    yield {"choices": [], "thread": threading.get_ident(), "loop": id(asyncio.get_running_loop())}
"""

    async def talk():
        here = {"choices": [], "thread": threading.get_ident(), "loop": id(asyncio.get_running_loop())}
        assert [item async for item in made.generate({})] == [here]

    with within(SeededWorld(1, "worker")):
        made = engine(tmp_path, source)
        with_engine(made, talk)


def test_an_engine_does_not_run_far_ahead_of_its_reader(tmp_path):
    source = """
made = 0
async def generate(request):
    global made
    if request["counts"]:
        yield {"choices": [], "made": made}
        return
    for made in range(100_000):
        yield {"choices": []}
"""
    made = engine(tmp_path, source)

    async def talk():
        answer = made.generate({"counts": False})
        for _ in range(200):
            await anext(answer)
        await asyncio.sleep(0.3)  # it could run ahead by thousands
        count = await anext(made.generate({"counts": True}))
        await answer.aclose()
        return count["made"]

    assert 199 <= with_engine(made, talk) <= 200 + 2 * CAPACITY


@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("x = 1", "defines no async generator"),
        ("async def generate(request):\n    return 1", "defines no async generator"),
        ("def generate(request):\n    yield 1", "defines no async generator"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("syntax error", "SyntaxError"),
        ("import sys\nsys.exit(3)", "exited while it was loaded, with 3"),
    ],
)
def test_a_file_that_cannot_be_an_engine_says_why(tmp_path, source, message):
    made = engine(tmp_path, source)

    async def talk():
        raise AssertionError("it should not have started")

    with pytest.raises(EngineError, match=message):
        with_engine(made, talk)


def test_it_serves_http_until_asked_to_end(tmp_path):
    (tmp_path / "e.py").write_text(GUIDE)
    port = free_port()
    command = [DYNAMO_RUN, "in=http", "out=pystr:e.py", "--model-name", "mine", "--http-port", str(port)]
    process = warm.start(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        wait_for(f"http://127.0.0.1:{port}", 1, process)
        body = {"model": "mine", "messages": [{"role": "user", "content": "?"}]}
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/chat/completions", json=body)
        assert answer.json()["choices"][0]["message"]["content"] == "The capital of France is Paris."
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=PATIENCE_S)
        assert process.returncode == 0, errors
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize(
    ("way_out", "why"),
    [("sys.exit(3)", "SystemExit: 3"), ("asyncio.get_running_loop().stop()", "it was stopped")],
)
def test_an_engine_that_ends_its_loop_has_failed(tmp_path, way_out, why):
    source = f"""
import asyncio, sys

async def generate(request):
    {way_out}
    yield {{}}
"""
    made = engine(tmp_path, source)

    async def talk():
        asked = asyncio.create_task(anext(made.generate({})))
        with pytest.raises(EngineError, match=re.escape(why)):
            await made.failed()
        asked.cancel()

    with_engine(made, talk)
