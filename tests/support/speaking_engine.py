"""An engine that says what its last message asks for, one byte a token: `python speaking_engine.py`."""

import asyncio
import json
import sys

import uvloop

from serving import DistributedRuntime, ModelType, dynamo_worker, register_llm

ASKED = "what were you asked?"


def vector(tokens):
    """Return how often a text has an a and a b."""
    return [tokens.count(97), tokens.count(98)]


async def speak(request):
    """Answer with the last message; with what the engine got, if that is the question."""
    if request.get("is_embedding"):
        yield {"token_ids": [], "finish_reason": "stop", "embedding": vector(request["token_ids"])}
        return
    text = bytes(request["token_ids"]).decode().rpartition("<|user|>")[2].removesuffix("\n<|assistant|>")
    if text == ASKED:
        text = json.dumps([request["sampling_options"].get("guided_decoding"), request.get("tools")])
    tokens = list(text.encode())[: request["stop_conditions"]["max_tokens"]]
    for start in range(0, len(tokens), 3):
        item = {"token_ids": tokens[start : start + 3]}
        if request["sampling_options"].get("logprobs") is not None:
            item["log_probs"] = [-1.0] * len(item["token_ids"])
        yield item
    yield {"token_ids": [], "finish_reason": "stop"}


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    formats = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}
    endpoints = []
    for name, more in {
        "agent": formats | {"guided_decoding": ["json", "choice"], "has_embeddings": True},
        "plain": {},
    }.items():
        endpoint = runtime.namespace("speaking").component(name).endpoint("generate")
        await register_llm(ModelType.Backend, endpoint, "", name, **more)
        endpoints.append(endpoint)
    await asyncio.gather(*(endpoint.serve_endpoint(speak) for endpoint in endpoints))


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
