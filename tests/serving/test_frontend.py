"""The live stack, asked by OpenAI's own client."""

import asyncio

import aiohttp
import openai
import pytest

from dynabench.launch import LocalStack
from mocker import EngineConfig
from serving.router import RouterConfig


def with_stack(talk, **engine):
    """Run a conversation with a fresh stack of two workers."""

    async def main():
        settings = {"num_gpu_blocks": 200, "block_size": 16, "speedup_ratio": 20.0} | engine
        stack = LocalStack(
            mode="kv",
            engine=EngineConfig(**settings),
            router=RouterConfig(),
            num_workers=2,
            seed=0,
            model="mock",
            host="127.0.0.1",
            port=0,
        )
        async with stack:
            return await talk(stack)

    return asyncio.run(main())


def test_openais_client_gets_completions_and_chats_streamed_and_whole():
    async def talk(stack):
        client = openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in (await client.models.list()).data] == ["mock"]
        whole = await client.completions.create(model="mock", prompt="once upon a time", max_tokens=20)
        stream = await client.completions.create(
            model="mock", prompt="once upon a time", max_tokens=20, stream=True, stream_options={"include_usage": True}
        )
        events = [event async for event in stream]
        assert "".join(event.choices[0].text for event in events if event.choices) == whole.choices[0].text
        assert events[-1].usage.completion_tokens == whole.usage.completion_tokens == 20
        assert len(whole.choices[0].text) == 20
        message = [{"role": "user", "content": "hello"}]
        chat = await client.chat.completions.create(model="mock", messages=message, max_tokens=5)
        stream = await client.chat.completions.create(model="mock", messages=message, max_tokens=5, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == chat.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        assert chunks[-1].choices[0].finish_reason == "length"
        await client.close()

    with_stack(talk)


def test_the_second_turn_of_a_conversation_hits_the_first():
    async def talk(stack):
        async with aiohttp.ClientSession() as session:

            async def ask(prompt):
                body = {"model": "mock", "prompt": prompt, "max_tokens": 40}
                async with session.post(f"{stack.url}/v1/completions", json=body) as response:
                    return response.headers["x-worker-id"], await response.json()

            worker, first = await ask("x" * 100)
            again, second = await ask("x" * 100 + first["choices"][0]["text"] + "and then?")
            assert again == worker
            # 140 tokens, the last of which was never computed: 8 full blocks of 16.
            assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == 128

    with_stack(talk)


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "text"),
    [
        ("POST", "/v1/completions", b"{", 400, "not a valid request"),
        ("POST", "/v1/completions", b'{"model": "mock"}', 400, "missing required field `prompt`"),
        ("POST", "/v1/completions", b'{"model": "other", "prompt": "x"}', 404, "model 'other' is not served here"),
        ("POST", "/v1/completions", b'{"model": "mock", "prompt": ""}', 400, "prompt must not be empty"),
        ("POST", "/v1/completions", b'{"model": "mock", "prompt": [-1]}', 400, "no token id"),
        (
            "POST",
            "/v1/completions",
            b'{"model": "mock", "prompt": "x", "max_tokens": 0}',
            400,
            "max_tokens must be from 1",
        ),
        ("POST", "/v1/completions", b'{"model": "mock", "prompt": "x", "max_tokens": 9000}', 400, "KV blocks"),
        ("POST", "/v1/chat/completions", b'{"model": "mock", "messages": []}', 400, "messages must not be empty"),
        ("GET", "/v1/completions", None, 405, "Method Not Allowed"),
        ("GET", "/nothing", None, 404, "Not Found"),
    ],
)
def test_errors_have_openais_body(method, path, body, status, text):
    async def talk(stack):
        async with (
            aiohttp.ClientSession() as session,
            session.request(method, stack.url + path, data=body) as response,
        ):
            assert response.status == status
            error = (await response.json())["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert text in error["message"]

    with_stack(talk)


def test_a_client_that_hangs_up_frees_its_engine():
    async def talk(stack):
        async with aiohttp.ClientSession() as session:
            url = f"{stack.url}/v1/completions"
            for _ in range(6):
                async with session.post(
                    url, json={"model": "mock", "prompt": "y" * 64, "max_tokens": 3000, "stream": True}
                ) as response:
                    await response.content.readany()
            # Six of these would fill both caches; aborted, they leave room at once.
            body = {"model": "mock", "prompt": "z" * 64, "max_tokens": 3000}
            async with session.post(url, json=body) as response:
                assert (await response.json())["usage"]["completion_tokens"] == 3000

    with_stack(talk, num_gpu_blocks=200, speedup_ratio=1000.0)
