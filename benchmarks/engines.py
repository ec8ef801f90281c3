"""Measure the cores of the families of engines: requests for each CPU second, in a closed loop and without drivers.

    python benchmarks/engines.py [ENGINE ...] [--requests 4000] [--no-leaps]

Each of 64 clients has one request at a time, 1024 tokens in and 128 out, or 80 to 100% of these (`drawn`). Prompts share
nothing, and the cache always evicts. Beside the speed stand the steps that a request takes: with leaps, one step is many
iterations.
"""

import argparse
import random
import time
from collections.abc import Callable

from mocker import BlockChain, Engine, EngineConfig, Sequence, SglangConfig, TrtllmConfig, new_engine
from mocker.contract import EngineSettings
from mocker.timing.choose import resolve
from mocker.timing.config import TimingConfig

NUM_CLIENTS, PROMPT, OUTPUT, NUM_BLOCKS = 64, 1024, 128, 16_384


def trtllm(**changed: object) -> EngineSettings:
    """Return TensorRT-LLM's settings for the loop."""
    return TrtllmConfig(max_batch_size=NUM_CLIENTS, enable_chunked_context=True, **changed)  # type: ignore[arg-type]


ENGINES: dict[str, Callable[[], EngineSettings]] = {
    "vllm": lambda: EngineConfig(block_size=32, max_num_seqs=NUM_CLIENTS),
    "sglang": lambda: SglangConfig(page_size=32, max_running_requests=NUM_CLIENTS),
    "sglang, no overlap": lambda: SglangConfig(
        page_size=32, max_running_requests=NUM_CLIENTS, disable_overlap_schedule=True
    ),
    "trtllm": trtllm,
    "trtllm, no overlap": lambda: trtllm(disable_overlap_scheduler=True),
    "trtllm, max utilization": lambda: trtllm(capacity_scheduler_policy="MAX_UTILIZATION"),
}


class Loop:
    """Clients that ask again as soon as they have an answer."""

    def __init__(self, engine: Engine, *, block_size: int, least: float) -> None:
        self._engine = engine
        self._block_size = block_size
        self._least = least
        self._rng = random.Random(0)
        self._num_asked = 0

    def ask(self) -> None:
        """Send the next request."""
        self._num_asked += 1
        prompt, output = (round(most * self._rng.uniform(self._least, 1)) for most in (PROMPT, OUTPUT))
        chain = BlockChain([(self._num_asked, place) for place in range(prompt // self._block_size)])
        self._engine.add(Sequence(self._num_asked, num_prompt=prompt, max_tokens=output, chain=chain))

    def run(self, num_requests: int, *, most: int) -> int:
        """Run until so many are answered; return the number of steps."""
        engine, num_steps, num_ended, now = self._engine, 0, 0, 0.0
        for _ in range(NUM_CLIENTS):
            self.ask()
        while num_ended < num_requests:
            engine.schedule(now, max_iterations=most)
            output = engine.complete()
            engine.outbox.take_events()
            now = output.end
            num_steps += 1
            num_ended += len(output.finished)
            for _ in output.finished:
                self.ask()
        return num_steps


def main() -> None:
    """Measure all engines, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(ENGINES), metavar="ENGINE")
    parser.add_argument("--requests", type=int, default=4000)
    parser.add_argument("--no-leaps", action="store_true", help="take one iteration at a time")
    options = parser.parse_args()
    timing = resolve(EngineConfig(), TimingConfig()).timing
    print(f"{'engine':24}  lengths  requests/s  steps for each")
    for name in options.names:
        for lengths, least in (("fixed", 1.0), ("drawn", 0.8)):
            config = ENGINES[name]()
            engine = new_engine(config, timing, num_blocks=NUM_BLOCKS)
            loop = Loop(engine, block_size=config.block_size, least=least)
            started = time.process_time()
            num_steps = loop.run(options.requests, most=1 if options.no_leaps else 1 << 30)
            seconds = time.process_time() - started
            speed, steps = options.requests / seconds, num_steps / options.requests
            print(f"{name:24}  {lengths:7}  {speed:10,.0f}  {steps:14.2f}", flush=True)


if __name__ == "__main__":
    main()
