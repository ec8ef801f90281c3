"""Your own engine in thirty lines: it answers with the prompt's tokens in reverse.

python examples/own_engine.py MODEL_FOLDER
dynamo-run in=http out=dyn
"""

import asyncio
import sys

import uvloop

from serving import DistributedRuntime, ModelType, dynamo_worker, register_llm


async def generate(request):
    """Receive a request as token ids; yield token ids, and a finish reason with the last."""
    wanted = request["token_ids"][::-1][: request["stop_conditions"]["max_tokens"]]
    for token in wanted[:-1]:
        await asyncio.sleep(0.01)  # your engine computes here
        yield {"token_ids": [token]}
    yield {"token_ids": wanted[-1:], "finish_reason": "length"}


@dynamo_worker()
async def worker(runtime: DistributedRuntime, model_path: str):
    """Register the model, then serve it until SIGTERM."""
    component = runtime.namespace("reverse").component("backend")
    endpoint = component.endpoint("generate")
    await register_llm(ModelType.Backend, endpoint, model_path, "reverse", migration_limit=3)
    await endpoint.serve_endpoint(generate)


if __name__ == "__main__":
    uvloop.run(worker(sys.argv[1] if len(sys.argv) > 1 else ""))
