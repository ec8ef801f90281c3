"""Record what vLLM's own scheduler does with images, for tests/golden: `python -m tests.real_engines.record_media MODEL FOLDER`.

It runs in vLLM's environment (see `.ci/engines`), whose version it writes down; MODEL is any small model's folder. The scenarios
are random ones, as in `test_vllm_scheduler.py`, but vLLM alone goes through them.
"""

import gzip
import json
import random
import sys
from collections import deque
from importlib import metadata
from pathlib import Path

from tests.real_engines.test_vllm_scheduler import (
    END,
    VLLM,
    Variant,
    Workers,
    config_of,
    variant_of,
    with_encoder,
    with_media,
)
from tests.real_engines.test_vllm_scheduler import requests_of as text_of

SCENARIOS = {
    # method, asynchronous, seed
    "media_dev1": (None, False, 16),
    "media_dev2": (None, True, 19),
    "media_dev3": (None, True, 23),
    "media_dev4": ("eagle", False, 13),
    "media_dev5": ("ngram", False, 13),
}
SETTINGS = (
    "block_size", "num_gpu_blocks", "max_num_seqs", "max_num_active_seqs", "max_num_batched_tokens", "max_model_len",
    "enable_prefix_caching", "enable_chunked_prefill", "watermark", "scheduler_reserve_full_isl", "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive", "prefill_schedule_interval", "async_scheduling", "num_speculative_tokens",
    "max_tokens_per_mm_item", "disable_chunked_mm_input",
)  # fmt: skip


class Recorder:
    """vLLM, and the rows of what it does."""

    def __init__(self, config, model, rng):
        self.vllm = VLLM(config, model, Variant())
        self._config, self._rng = config, rng
        self.flights = deque()
        self.rows = []
        self._num_steps = 0

    def add(self, asked):
        self.vllm.add(asked)
        facts = {"id": str(asked.number), "priority": asked.priority, "cache_salt": None, "stop_token_ids": [END]}
        facts |= {"prompt_len": len(asked.prompt)}
        self.rows.append({"op": "add"} | facts)

    def abort(self, asked):
        self.vllm.abort(asked)
        self.rows.append({"op": "abort", "id": str(asked.number)})

    def schedule(self):
        flight, facts = self.vllm.schedule()
        output, cached = flight[0], flight[0].scheduled_cached_reqs
        users, freeable, _ = facts["encoder"]
        self.rows.append(
            {
                "op": "schedule",
                "step": self._num_steps,
                "num_scheduled_tokens": output.num_scheduled_tokens,
                "new": [
                    {"id": one.req_id, "num_computed_tokens": one.num_computed_tokens, "block_ids": one.block_ids[0]}
                    for one in output.scheduled_new_reqs
                ],
                "cached": cached_of(cached),
                "total": output.total_num_scheduled_tokens,
                "finished_before": sorted(output.finished_req_ids),
                "preempted": sorted(output.preempted_req_ids or ()),
                "spec": output.scheduled_spec_decode_tokens,
                "num_encoded": facts["encoded"],
                "encoder_cache": {
                    "users": users,
                    "freeable": freeable,
                    "free": self.vllm.scheduler.encoder_cache_manager.num_free_slots,
                },
            }
            | self._state(facts)
        )
        self.flights.append((self._num_steps, flight))
        self._num_steps += 1

    def update(self, workers):
        number, flight = self.flights.popleft()
        transferred = workers.report(*flight[2:])
        self._draw(flight, transferred)
        facts = self.vllm.update(flight, transferred)
        events = [{"type": kind, "block_hashes": blocks} for kind, blocks in self.vllm.events()]
        self.rows.append(
            {
                "op": "update",
                "step": number,
                "sampled": {str(id): [0] * count for id, count in facts["speaking"].items()},
                "finished": {str(id): reason for id, reason in facts["finished"].items()},
                "accepted": {str(id): count for id, count in transferred.accepted.items()},
                "kv_events": events,
                "prefix_cache_stats": None,
            }
            | self._state(facts)
        )
        if transferred.drafts:
            drafts = {str(id): [0] * count for id, count in transferred.drafts.items()}
            self.rows.append({"op": "drafts", "drafts": drafts})

    def _draw(self, flight, output):
        """Draw what becomes of drafts, as `Pair` does."""
        most, padded = self._config.num_speculative_tokens, self.vllm.padded(flight)
        for id, drafts in flight[0].scheduled_spec_decode_tokens.items():
            output.accepted[int(id)] = 0 if int(id) in padded else self._rng.randint(0, len(drafts))
        if most and not self._config.async_scheduling:
            least = 0 if self._config.speculative_method == "ngram" else most
            output.drafts |= {int(id): self._rng.randint(least, most) for id in flight[1]}

    def _state(self, facts):
        named = {name: [str(id) for id in facts[name]] for name in ("running", "waiting")}
        return named | {"free_blocks": facts["free"]}


def cached_of(cached):
    """Return what vLLM tells its workers of requests that they know."""
    columns = (cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, cached.new_block_ids)
    return [
        {
            "id": id,
            "num_computed_tokens": num_computed,
            "num_output_tokens": num_output,
            "new_block_ids": blocks[0] if blocks else [],
            "resumed": id in cached.resumed_req_ids,
        }
        for id, num_computed, num_output, blocks in zip(*columns, strict=True)
    ]


def record(name, model, folder):
    """Let vLLM go through a scenario, and write it and what it did."""
    method, is_async, seed = SCENARIOS[name]
    rng = random.Random(seed)
    config, _ = variant_of(rng, config_of(rng, is_async, None), method, 1)
    config = with_encoder(rng, config)
    requests = with_media(rng, text_of(rng, config, None), config.max_tokens_per_mm_item)
    recorder, workers, asked = Recorder(config, model, rng), Workers(rng), deque(requests)
    aborts = sorted([one for one in asked if one.aborted is not None], key=lambda one: one.aborted)
    depth, turn = 1 + is_async, 0
    while asked or recorder.flights or recorder.vllm.scheduler.has_requests():
        turn += 1
        assert turn < 3000, "it does not end"
        while asked and asked[0].arrives <= turn:
            recorder.add(asked.popleft())
        while aborts and aborts[0].aborted < turn:
            recorder.abort(aborts.pop(0))
        if recorder.vllm.scheduler.has_requests():
            recorder.schedule()
            if len(recorder.flights) < depth:
                continue
        if recorder.flights:
            recorder.update(workers)
    settings = {each: getattr(config, each) for each in SETTINGS} | {"policy": config.scheduling_policy}
    settings |= {"spec_method": method} if method else {}
    found = metadata.packages_distributions()["vllm"][0]
    meta = {"op": "meta", "scenario": name, "vllm": metadata.version(found), "config": settings}
    summaries = [
        {"op": "summary", "id": str(one.number), "output_token_ids": one.answer[: one.stop_after]}
        | recorder.vllm.ended(str(one.number))
        for one in requests
    ]
    actions = [
        {
            "id": str(one.number),
            "prompt_token_ids": one.prompt,
            "max_tokens": len(one.answer),
            "media": [list(item) for item in one.media],
        }
        for one in requests
    ]
    write(folder / f"{name}.json.gz", [{"name": name, "actions": actions}])
    write(folder / f"{name}.sched.jsonl.gz", [meta, *recorder.rows, *summaries])


def write(path, rows):
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    path.write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    target = Path(sys.argv[2])
    target.mkdir(parents=True, exist_ok=True)
    for scenario in SCENARIOS:
        record(scenario, Path(sys.argv[1]), target)
