"""A worker with SGLang in the form of the guide's example: `python sglang_worker.py --endpoint dyn://... --model FOLDER`.

What it reads of a request, and what it yields, is what engines written for Dynamo read and yield.
"""

import argparse
import asyncio
import json
import os
from pathlib import Path

import sglang
import uvloop
from sglang.srt.server_args import ServerArgs

from serving import DistributedRuntime, ModelType, dynamo_worker, register_llm


class RequestHandler:
    """Calls the engine."""

    def __init__(self, engine):
        self.engine = engine

    async def generate(self, request):
        with Path(os.environ["REQUESTS"]).open("a") as log:
            log.write(json.dumps(request) + "\n")
        parameters = {
            "temperature": request["sampling_options"]["temperature"] or 0.7,
            "max_new_tokens": request["stop_conditions"]["max_tokens"],
        }
        num_before = 0
        answers = await self.engine.async_generate(
            input_ids=request["token_ids"], sampling_params=parameters, stream=True
        )
        async for answer in answers:
            reason, tokens = answer["meta_info"]["finish_reason"], answer["output_ids"]
            yield {
                "token_ids": tokens[num_before:],
                "tokens": None,
                "text": None,
                "cum_log_probs": None,
                "log_probs": None,
                "finish_reason": reason["type"] if reason else None,
            }
            num_before = len(tokens)


@dynamo_worker(static=False)
async def worker(runtime: DistributedRuntime):
    """Register the model, then serve it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--endpoint", default="dyn://dynamo.backend.generate")
    parser.add_argument("--model", required=True)
    given = parser.parse_args()
    namespace, component, name = given.endpoint.removeprefix("dyn://").split(".")
    part = runtime.namespace(namespace).component(component)
    await part.create_service()
    endpoint = part.endpoint(name)
    await register_llm(ModelType.Backend, endpoint, given.model)
    engine = sglang.Engine(server_args=ServerArgs(model_path=given.model, skip_tokenizer_init=True))
    await endpoint.serve_endpoint(RequestHandler(engine).generate)


if __name__ == "__main__":
    uvloop.install()
    asyncio.run(worker())
