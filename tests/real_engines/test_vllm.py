"""vLLM behind the KV router: what it tells of its cache is what it holds, and nothing is left of it when it ends."""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import httpx
import openai
import pytest

from tests.real_engines.conftest import running
from tests.real_engines.serving_vllm import VLLM_FLAGS
from tests.real_engines.test_engine import load
from tests.support.processes import is_alive
from tests.support.waiting import PATIENCE_S, until

pytestmark = pytest.mark.timeout(500)
BLOCK = 32


@pytest.fixture(scope="module")
def pair(engine):
    """Two workers."""
    with running(engine, num_workers=2, frontend={"migration_limit": 3}) as stack:
        yield stack


def ask(stack, prompt, **more):
    """Ask; return (worker, tokens that the router expected in its cache, usage, text)."""
    with openai.OpenAI(base_url=f"{stack.url}/v1", api_key="none", timeout=120, max_retries=0) as client:
        response = client.completions.with_raw_response.create(
            model="tiny", prompt=prompt, temperature=0, **({"max_tokens": 2} | more)
        )
    answer = response.parse()
    slot, overlap = (int(response.headers[name]) for name in ("x-worker-slot", "x-overlap-tokens"))
    return slot, overlap, answer.usage, answer.choices[0].text


def tokens(seed, count):
    return random.Random(seed).choices(range(10, 1000), k=count)


def settle(stack, prompt, expected):
    """Wait until the router has heard of the prompt's blocks."""

    def known():
        answer = httpx.post(
            f"{stack.url}/v1/completions",
            json={"model": "tiny", "prompt": prompt, "max_tokens": 1, "stream": True},
        )
        return int(answer.headers["x-overlap-tokens"]) >= expected

    until(known)


def test_the_second_turn_goes_to_the_worker_that_holds_the_first(pair):
    conversations = [tokens(f"conversation {number}", 4 * BLOCK + 5) for number in range(6)]
    first = [ask(pair, prompt) for prompt in conversations]
    assert {slot for slot, *_ in first} == {0, 1}
    assert all(usage.prompt_tokens_details.cached_tokens == 0 for _, _, usage, _ in first)
    time.sleep(1)  # events travel
    for number, prompt in enumerate(conversations):
        slot, overlap, usage, _ = ask(pair, prompt + tokens(f"turn {number}", 50))
        assert slot == first[number][0]
        assert overlap == usage.prompt_tokens_details.cached_tokens == 4 * BLOCK  # the latter is vLLM's own count


def test_what_the_router_expects_is_what_vllm_finds_also_when_blocks_are_evicted(pair):
    rng = random.Random(7)
    prompts = [tokens(f"long {number}", rng.randrange(8, 40) * BLOCK + rng.randrange(BLOCK)) for number in range(30)]
    differences, hits, misses = [], 0, 0
    for step in range(90):
        prompt = prompts[rng.randrange(len(prompts))]
        _, overlap, usage, _ = ask(pair, prompt)
        cached = usage.prompt_tokens_details.cached_tokens
        if overlap != cached:
            differences.append((step, overlap, cached))
        hits += cached > 0
        misses += cached == 0
        time.sleep(0.03)  # events travel
    assert hits > 10
    assert misses > len(prompts)  # 30 first times, and what was evicted since
    assert differences == []


def test_an_answer_goes_on_elsewhere_when_the_engines_own_process_dies(pair):
    prompt = tokens("migrating", 100)
    whole = ask(pair, prompt, max_tokens=400, extra_body={"ignore_eos": True})[3]
    with (
        openai.OpenAI(base_url=f"{pair.url}/v1", api_key="none", timeout=120, max_retries=0) as client,
        client.completions.create(
            model="tiny", prompt=prompt, temperature=0, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        ) as pieces,
    ):
        text = "".join(next(pieces).choices[0].text for _ in range(10))
        workers = [pid for name, pid in pair.group.processes.items() if name.startswith("worker")]
        os.kill(busiest([engine_core(pid) for pid in workers]), signal.SIGKILL)
        text += "".join(chunk.choices[0].text for chunk in pieces if chunk.choices)
    assert text == whole
    until(lambda: len(pair.group.dead) == 1)


def engine_core(pid):
    """Return the process of vLLM's engine below a worker."""
    for child in descendants(pid):
        if "EngineCore" in Path(f"/proc/{child}/comm").read_text() or b"EngineCore" in command(child):
            return child
    raise AssertionError(f"worker {pid} has no engine process")


def command(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def busiest(pids):
    """Return the process that computes most for a while, with those below it."""

    def ticks(pid):
        total = 0
        for each in (pid, *descendants(pid)):
            fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
            total += int(fields[11]) + int(fields[12])
        return total

    before = {pid: ticks(pid) for pid in pids}
    time.sleep(0.2)
    return max(pids, key=lambda pid: ticks(pid) - before[pid])


def descendants(pid):
    parents = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            parents.setdefault(int(fields[1]), []).append(int(entry.name))
    found, waiting = [], [pid]
    while waiting:
        children = parents.get(waiting.pop(), [])
        found += children
        waiting += children
    return found


def test_data_parallel_ranks_are_routed_to_one_by_one(engine):
    with running(engine, flags=("--data-parallel-size=2",)) as stack:
        prompts = [tokens(f"rank {number}", 3 * BLOCK + 1) for number in range(6)]
        slots = [ask(stack, prompt)[0] for prompt in prompts]
        assert set(slots) == {0, 1}
        time.sleep(1)  # events travel
        for slot, prompt in zip(slots, prompts, strict=True):
            again, overlap, usage, _ = ask(stack, prompt + [7] * 20)
            assert (again, overlap) == (slot, 3 * BLOCK)
            assert usage.prompt_tokens_details.cached_tokens == 3 * BLOCK
        until(lambda: load(stack) == (0, 0))
        below = [child for pid in stack.group.processes.values() for child in descendants(pid)]
        assert any(b"Coordinator" in command(child) for child in below)
    until(lambda: not any(map(is_alive, below)))


@pytest.mark.parametrize(
    ("number", "is_loaded"), [(signal.SIGKILL, True), (signal.SIGINT, True), (signal.SIGTERM, False)]
)
def test_nothing_is_left_of_a_worker_that_ends(folder, tmp_path, number, is_loaded):
    environment = os.environ | {"DYN_DISCOVERY_DIR": str(tmp_path / "d")}
    worker = subprocess.Popen(
        [sys.executable, "-m", "serving.vllm", folder, "--", *VLLM_FLAGS],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: len(descendants(worker.pid)) > 1, worker)
        if is_loaded:
            until(
                lambda: any(b"v1/mdc/" in file.read_bytes() for file in (tmp_path / "d").rglob("*") if file.is_file()),
                worker,
            )
        children = descendants(worker.pid)
        if number == signal.SIGINT:
            os.killpg(worker.pid, number)  # as a terminal does: everyone in the group gets it
        else:
            worker.send_signal(number)
        worker.communicate(timeout=PATIENCE_S)
        until(lambda: not any(map(is_alive, children)))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        worker.wait()


def test_an_argument_that_vllm_does_not_have_is_told_in_one_line(folder):
    done = subprocess.run(
        [sys.executable, "-m", "serving.vllm", folder, "--", "--no-such-thing=1"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "serving.vllm: AsyncEngineArgs refuses its arguments" in done.stderr
    assert "no_such_thing" in done.stderr
