"""Measure what the schedulers of installed engines cost beside ours, in CPU time per step and per request in it.

    python benchmarks/installed_core.py [--engine vllm] [--engine-python PYTHON] [--running 1 16 64 256]

So many requests of 500 tokens with answers of 200 run at once. CPU time is that of both processes, so other work on the
machine changes little. Ours takes a leap where the installed one takes each step. It prints a table in Markdown;
`docs/how-to/is-the-mocker-my-vllm.md` states figures of it.
"""

import argparse
import os
import time
from pathlib import Path

from dynabench.installed.process import SchedulerProcess, scheduler_process
from mocker import BlockChain, EngineConfig, Sequence, SglangConfig
from mocker.engine import Engine
from mocker.families import new_engine
from mocker.timing.constant import Constant

PROMPT, ANSWER, NUM_BLOCKS, BLOCK = 500, 200, 20_000, 16
NUM_REQUESTS = 3
"""Of each that runs at once."""
ROUNDS = 3
"""The least of them counts."""
CONFIGS = {
    "vllm": EngineConfig(block_size=BLOCK, max_num_seqs=1024),
    "sglang": SglangConfig(page_size=BLOCK, max_running_requests=1024),
}


def steps_of(engine: Engine, num_running: int) -> tuple[int, int]:
    """Serve requests, so many at once; return the steps, and the tokens of answers."""
    now, num_steps, left = 0.0, 0, num_running * NUM_REQUESTS
    running = 0
    while left or running:
        while left and running < num_running:
            left, running = left - 1, running + 1
            chain = BlockChain([left // 2], PROMPT // BLOCK, blocks_per_id=PROMPT // BLOCK)
            engine.add(Sequence(left, num_prompt=PROMPT, max_tokens=ANSWER - left % 50, chain=chain))
        step = engine.schedule(now, max_iterations=1 << 20)
        assert step is not None, "something runs"
        now, num_steps = step.end, num_steps + step.num_iterations
        running -= len(engine.complete().finished)
    return num_steps, sum([ANSWER - number % 50 for number in range(num_running * NUM_REQUESTS)])


def cpu_s(process: SchedulerProcess | None) -> float:
    """Return the CPU time of this process, and of a scheduler's with its forks (s)."""
    spent = time.process_time()
    if process is not None:
        for pid in family(process.pid):
            user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            spent += (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")
    return spent


def family(pid: int) -> list[int]:
    """Return a process and those that it has started."""
    children = [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *children]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=CONFIGS, default="vllm")
    parser.add_argument("--engine-python")
    parser.add_argument("--running", type=int, nargs="+", default=[1, 16, 64, 256])
    given = parser.parse_args()
    config = CONFIGS[given.engine]
    with scheduler_process(given.engine_python, given.engine) as process:
        print(f"{given.engine} {process.release.version}, {NUM_REQUESTS} times as many requests as run at once\n")
        print("| running | steps | ours, us a step | installed, us a step | us a request and step | times as long |")
        print("| ---: | ---: | ---: | ---: | ---: | ---: |")
        for num_running in given.running:
            each = []
            for installed in (None, process.new_scheduler):
                spent = []
                for _ in range(ROUNDS):
                    engine = new_engine(
                        config, Constant(0.03, 0.01), num_blocks=NUM_BLOCKS, kv_events=False, installed=installed
                    )
                    start = cpu_s(process)
                    num_steps, num_tokens = steps_of(engine, num_running)
                    spent.append(cpu_s(process) - start)
                    process.forget()
                each.append(min(spent))
            ours, theirs = each
            print(
                f"| {num_running} | {num_steps:,} | {ours / num_steps * 1e6:,.1f} | {theirs / num_steps * 1e6:,.0f} | "
                f"{theirs / num_tokens * 1e6:,.1f} | {theirs / ours:,.0f} |"
            )


if __name__ == "__main__":
    main()
