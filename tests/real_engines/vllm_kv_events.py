"""A program: vLLM's engine in this process, through a scenario on stdin; prints its answers and the KV events it published.

The scenario is {"model", "folder", "engine": {...}, "waves": [[{"id", "prompt", "max_tokens", ...}] or "reset"]}. The
requests of a wave come at once, and end before the next.
"""

import asyncio
import contextlib
import json
import os
import sys


def main() -> None:
    scenario = json.load(sys.stdin)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    with contextlib.redirect_stdout(sys.stderr):  # vLLM talks
        outputs, frames = run(scenario)
    json.dump(
        {"outputs": outputs, "frames": [[topic, number, data.hex()] for topic, number, data in frames]}, sys.stdout
    )


def run(scenario):
    import vllm
    from vllm.config import KVEventsConfig
    from vllm.v1.engine.llm_engine import LLMEngine

    from serving.engines.vllm.on_cpu import keep_async_scheduling
    from tests.stand_in.kv_subscriber import Subscriber

    folder = scenario["folder"]
    endpoints = {"endpoint": f"ipc://{folder}/e", "replay_endpoint": f"ipc://{folder}/r", "topic": "kv"}
    arguments = vllm.EngineArgs(
        model=scenario["model"],
        dtype="float32",
        enforce_eager=True,
        gpu_memory_utilization=0.2,
        kv_events_config=KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", **endpoints),
        **scenario["engine"],
    )
    keep_async_scheduling(arguments)
    engine = LLMEngine.from_engine_args(arguments)
    outputs: dict[str, list[int]] = {}
    for wave in scenario["waves"]:
        if wave == "reset":
            assert engine.reset_prefix_cache()
            continue
        for request in wave:
            prompt = {"prompt_token_ids": request["prompt"]} | request.get("more", {})
            parameters = vllm.SamplingParams(max_tokens=request["max_tokens"], ignore_eos=True, temperature=0)
            engine.add_request(request["id"], prompt, parameters, session_id=request.get("session_id"))
        # As in the loop of vLLM's server, which goes on until no step is in flight.
        while engine.has_unfinished_requests() or engine.engine_core.engine_core.batch_queue:
            for output in engine.step():
                if output.finished:
                    outputs[output.request_id] = list(output.outputs[0].token_ids)

    async def collect():
        subscriber = Subscriber(endpoints["endpoint"], endpoints["replay_endpoint"])
        found = await subscriber.frames(0)
        subscriber.close()
        return [(topic.decode(), number, payload) for topic, number, payload in found]

    # What is published is in the hands of a thread, which answers when it has published all before.
    return outputs, asyncio.run(collect())


if __name__ == "__main__":
    main()
