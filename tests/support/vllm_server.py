"""A stand-in for `vllm serve`: its `/v1/completions` with token ids, as vLLM 0.32's entrypoints/openai/completion have it.

Its model repeats the prompt, each token one higher. KV is passed on as by the NIXL connector: with the end of an answer that is
not streamed and was asked with `do_remote_decode`; and an answer for which KV is to be read fails if that is not there.
"""

import asyncio
import contextlib
import itertools
import json

from aiohttp import web

END = 2
MAX_LEN = 4096
NUMBERS = itertools.count()
HELD = {}
"""The prompts whose KV is held, by engine and request, for all servers."""


class VllmServer:
    """One server; `asked` has what it was asked, in order."""

    def __init__(self, *names, ids=True, usage_details=True, connects=True, key="", block_size=16):
        self.names = names or ("served",)
        self.engine_id = f"engine-{next(NUMBERS)}"
        self.asked, self.headers = [], []
        self.num_running = self.num_aborted = self.num_read = 0
        self.status = None
        """Of every answer, where it is to be an error."""
        self.stops_after = None
        """How many tokens it says of an answer, and then no more."""
        self._connects = connects
        self._gives_ids, self._has_details, self._key, self._block_size = ids, usage_details, key, block_size

    async def __aenter__(self):
        application = web.Application(client_max_size=1 << 26)
        application.router.add_get("/v1/models", self._models)
        application.router.add_get("/health", self._health)
        application.router.add_post("/v1/completions", self._completions)
        self._runner = web.AppRunner(application, handler_cancellation=True, shutdown_timeout=0.01)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_):
        await self._runner.cleanup()

    async def _health(self, request):
        return web.Response()

    async def _models(self, request):
        if self._key and request.headers.get("Authorization") != f"Bearer {self._key}":
            return web.json_response({"error": "Unauthorized"}, status=401)
        cards = [
            {"id": name, "object": "model", "owned_by": "vllm", "root": "/m", "parent": None, "max_model_len": MAX_LEN}
            for name in self.names
        ]
        return web.json_response({"object": "list", "data": cards})

    async def _completions(self, request):
        asked = await request.json()
        self.asked.append(asked)
        self.headers.append(request.headers)
        if problem := self._problem(asked):
            return error(*problem)
        self.num_running += 1
        try:
            return await (self._stream if asked["stream"] else self._whole)(request, asked)
        except (asyncio.CancelledError, ConnectionError):
            self.num_aborted += 1
            raise
        finally:
            self.num_running -= 1

    def _problem(self, asked):
        if self.status is not None:
            return self.status, "It is as the test says.", "Error"
        if asked["model"] not in self.names:
            return 404, f"The model `{asked['model']}` does not exist.", "NotFoundError"
        if asked.get("stream_options") and not asked["stream"]:
            return 400, "Stream options can only be defined when `stream=True`.", "BadRequestError"
        if asked.get("prompt_logprobs") is not None and asked["stream"]:
            return 400, "`prompt_logprobs` are not available when `stream=True`.", "BadRequestError"
        length = len(asked["prompt"])
        if length + asked.get("max_tokens", 16) > MAX_LEN:
            message = f"This model's maximum context length is {MAX_LEN} tokens. However, your request has {length} input tokens."
            return 400, message, "BadRequestError"
        return None

    def _generated(self, asked):
        """Return the answer's tokens and why it ends."""
        prompt, params = asked["prompt"], asked.get("kv_transfer_params") or {}
        if params.get("do_remote_prefill"):
            prompt = HELD.pop((params["remote_engine_id"], params["remote_request_id"]), None)
            if prompt is None:
                raise LookupError("the KV is not there")
            self.num_read += 1
        tokens, ends = [], {*asked.get("stop_token_ids", ()), *(() if asked.get("ignore_eos") else (END,))}
        while len(tokens) < asked.get("max_tokens", 16):
            tokens.append(prompt[len(tokens) % len(prompt)] + 1)
            if tokens[-1] in ends and len(tokens) > asked.get("min_tokens", 0):
                return tokens, "stop"
        return tokens, "length"

    def _logprobs(self, tokens, asked):
        if asked.get("logprobs") is None:
            return None
        name = "token_id:{}" if self._gives_ids and asked.get("return_tokens_as_token_ids") else "<{}>"
        return {
            "text_offset": [0] * len(tokens),
            "tokens": [name.format(token) for token in tokens],
            "token_logprobs": [-0.5] * len(tokens),
            "top_logprobs": [
                {name.format(token + other): -0.5 - other for other in range(asked["logprobs"] + 1)} for token in tokens
            ],
        }

    def _choice(self, tokens, reason, asked):
        choice = {
            "index": 0,
            "text": "".join(f"<{token}>" for token in tokens),
            "logprobs": self._logprobs(tokens, asked),
        }
        choice |= {"finish_reason": reason, "stop_reason": None}
        wants_ids = self._gives_ids and asked.get("return_token_ids")
        return choice | {"token_ids": tokens if wants_ids else None}

    def _usage(self, num_tokens, asked):
        length = len(asked["prompt"])
        usage = {"prompt_tokens": length, "total_tokens": length + num_tokens, "completion_tokens": num_tokens}
        if self._has_details:
            usage["prompt_tokens_details"] = {"cached_tokens": length // self._block_size * self._block_size}
        return usage

    async def _whole(self, request, asked):
        try:
            tokens, reason = self._generated(asked)
        except LookupError:
            return error(500, "Internal server error", "InternalServerError")
        params, answered = asked.get("kv_transfer_params") or {}, None
        if self._connects and params.get("do_remote_decode") and reason == "length":
            key = (self.engine_id, asked["request_id"])
            HELD[key] = asked["prompt"]
            blocks = [[*range(len(asked["prompt"]) // self._block_size + 1)]]
            answered = {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": blocks, "tp_size": 1}
            answered |= dict(zip(("remote_engine_id", "remote_request_id"), key, strict=True))
            answered |= {"remote_host": "127.0.0.1", "remote_port": 5600}
        choice = self._choice(tokens, reason, asked)
        if asked.get("return_token_ids"):
            choice["prompt_token_ids"] = asked["prompt"]
        if (wanted := asked.get("prompt_logprobs")) is not None:
            choice["prompt_logprobs"] = [
                None,
                *(
                    {
                        token + other: {"logprob": -1.0 - other, "rank": other + 1, "decoded_token": "x"}
                        for other in range(wanted + 1)
                    }
                    for token in asked["prompt"][1:]
                ),
            ]
        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.names[0]}
        return web.json_response(
            head | {"choices": [choice], "usage": self._usage(len(tokens), asked), "kv_transfer_params": answered}
        )

    async def _stream(self, request, asked):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)

        async def say(content):
            await response.write(f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode())

        head = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self.names[0]}
        try:
            tokens, reason = self._generated(asked)
        except LookupError:
            await say(json.loads(error(500, "Internal server error", "InternalServerError").body))
        else:
            for place, token in enumerate(tokens):
                if place == self.stops_after:
                    await asyncio.Event().wait()
                choice = self._choice([token], reason if place == len(tokens) - 1 else None, asked)
                if not place and asked.get("return_token_ids"):
                    choice["prompt_token_ids"] = asked["prompt"]
                await say(head | {"choices": [choice]})
            if (asked.get("stream_options") or {}).get("include_usage"):
                await say(head | {"choices": [], "usage": self._usage(len(tokens), asked)})
        await say("[DONE]")
        await response.write_eof()
        return response


def error(status, message, kind):
    return web.json_response(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status=status
    )


@contextlib.asynccontextmanager
async def strange(answer):
    """Serve one behaviour, `answer(reader, writer)`, to whoever completes; give the URL."""
    models = json.dumps({"object": "list", "data": [{"id": "served", "max_model_len": MAX_LEN}]}).encode()
    clients = set()

    async def on_client(reader, writer):
        clients.add(asyncio.current_task())
        with contextlib.suppress(ConnectionError, asyncio.IncompleteReadError):
            head = await reader.readuntil(b"\r\n\r\n")
            if head.startswith(b"GET "):
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(models) + models)
            else:
                [length] = [
                    int(line[15:]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
                ]
                await reader.readexactly(length)
                await answer(reader, writer)
        writer.close()

    server = await asyncio.start_server(on_client, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in clients:
            task.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
