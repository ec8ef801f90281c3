"""An engine with everything the frontend must cope with: `python strange_engine.py MODEL_PATH`."""

import asyncio
import sys

import uvloop

from serving import DistributedRuntime, ModelType, dynamo_worker, register_llm


async def tell(request, context):
    """Give log-probabilities, or misbehave, as the first token of the prompt says."""
    kind = request["token_ids"][0]
    if kind == 66:
        raise RuntimeError("secret at /work/engine.py")
    if kind == 67:
        yield "nonsense"
        return
    if kind == 68:
        yield {"token_ids": [72]}
        raise RuntimeError("in the middle")
    for place in range(request["stop_conditions"]["max_tokens"]):
        if kind == 70:
            yield {"token_ids": [72 + place]}
            continue
        top = [{"token": "H", "logprob": -0.5}, {"token": "I", "logprob": -1.5}]
        yield {"token_ids": [72 + place], "log_probs": [-0.5 - place], "top_logprobs": [top]}
    if kind != 69:
        yield {"token_ids": [], "finish_reason": "stop"}  # else it ends without saying why


def nested(depth):
    """Return lists in lists."""
    value = []
    for _ in range(depth):
        value = [value]
    return value


async def complete(request):
    """Take whole OpenAI requests."""
    if request["prompt"] == "fail":
        raise RuntimeError("no")
    odd = {"odd object": object(), "odd large": 1 << 70, "odd deep": nested(5000)}.get(request["prompt"])
    if odd is not None:
        yield {"id": "x", "choices": [{"index": 0, "text": "x"}], "odd": odd}
    if request["prompt"] == "forever":
        await asyncio.sleep(3600)
    pieces = ["slow"] * 20 if request["prompt"] == "slow" else ["what ", "you ", "asked"]
    for piece in pieces:
        await asyncio.sleep(0.02 if piece == "slow" else 0)
        yield {
            "id": "x",
            "object": "text_completion",
            "model": request["model"],
            "choices": [{"index": 0, "text": piece}],
        }
    yield {"id": "x", "object": "text_completion", "choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}


@dynamo_worker()
async def main(runtime: DistributedRuntime):
    backend = runtime.namespace("strange").component("tokens").endpoint("generate")
    whole = runtime.namespace("strange").component("whole").endpoint("generate")
    await register_llm(ModelType.Backend, backend, "", "tokens")
    await register_llm(ModelType.Completion, whole, "", "whole")
    await asyncio.gather(backend.serve_endpoint(tell), whole.serve_endpoint(complete))


if __name__ == "__main__":
    sys.exit(uvloop.run(main()))
