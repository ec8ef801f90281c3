"""A vLLM scheduler that records what each step computes and how long it takes. Name it in vLLM's `--scheduler-cls`.

It runs inside vLLM's engine process and does not change the schedule. It writes rows to the file named by
DYNABENCH_STEP_LOG, one JSON array per line (see `dynabench.fidelity.step_log`). The clock is CLOCK_MONOTONIC, which
client and engine share on one host. A step's row is written when its result arrives; with asynchronous scheduling, the
next step is already scheduled by then.
"""

import json
import os
from time import perf_counter as clock
from time import time
from typing import Any

import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from dynabench.fidelity.step_log import LOG

ENGINE_SETTINGS = ("block_size", "num_gpu_blocks", "enable_prefix_caching")
SCHEDULER_SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "scheduler_reserve_full_isl",
    "watermark",
    "policy",
    "async_scheduling",
)


class StepRecorder(Scheduler):  # type: ignore[misc]
    """vLLM's own scheduler with recording."""

    def __new__(cls, *_: Any, vllm_config: Any, **__: Any) -> "StepRecorder":
        """Record the one of vLLM's two schedulers that it would have used."""
        recorder: StepRecorder = super().__new__(
            AsyncStepRecorder if vllm_config.scheduler_config.async_scheduling else cls
        )
        return recorder

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._log = open(f"{os.environ[LOG]}.{os.getpid()}", "w", buffering=1)  # noqa: SIM115, PTH123 (the process's)
        self._pending: dict[int, list[float]] = {}
        self._added_s: dict[str, float] = {}
        self._epoch = clock() - time()  # vLLM stamps arrivals with the time of day
        config = self.vllm_config
        facts = {name: getattr(config.cache_config, name) for name in ENGINE_SETTINGS}
        facts |= {name: getattr(config.scheduler_config, name, None) for name in SCHEDULER_SETTINGS}
        facts |= {
            "version": vllm.__version__,
            "max_model_len": config.model_config.max_model_len,
            "model": config.model_config.model,
            "dtype": str(config.model_config.dtype).removeprefix("torch."),
            "tensor_parallel_size": config.parallel_config.tensor_parallel_size,
            "device": current_platform.get_device_name(),
        }
        self._write("engine", facts)

    def add_request(self, request: Any) -> None:
        """Record the time, then call vLLM's method."""
        self._added_s[request.request_id] = clock()
        super().add_request(request)

    def schedule(self, *arguments: Any, **options: Any) -> Any:
        """Call vLLM's method, and record the scheduled work."""
        started = clock()
        output = super().schedule(*arguments, **options)
        if output.total_num_scheduled_tokens:
            self._pending[id(output)] = [started, *self._work(output.num_scheduled_tokens)]
        return output

    def update_from_output(self, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        """Call vLLM's method, and record when the step's tokens are ready."""
        scheduled = (self.requests.get(id) for id in scheduler_output.num_scheduled_tokens if id in self._added_s)
        new = [request for request in scheduled if request is not None]  # the others have been aborted since
        outputs = super().update_from_output(scheduler_output, *arguments, **options)
        now = clock()
        if (row := self._pending.pop(id(scheduler_output), None)) is not None:
            preempted = len(getattr(scheduler_output, "preempted_req_ids", None) or ())
            goes_on = bool(self._pending) or self.has_unfinished_requests()
            self._write("step", [row[0], now, *row[1:], preempted, int(goes_on)])
        for request in new:
            if request.num_output_tokens:
                added = self._added_s.pop(request.request_id, now)
                self._write("first", [request.arrival_time + self._epoch, added, now, request.num_prompt_tokens])
        return outputs

    def _work(self, counts: dict[str, int]) -> tuple[float, ...]:
        """Return prefill tokens, their contexts and pairs, then prefilling sequences, decoding ones and their contexts."""
        tokens = contexts = sequences = decodes = kv = 0
        pairs = 0.0
        for id, count in counts.items():
            request = self.requests[id]
            context = request.num_computed_tokens - count  # scheduling has already counted them
            if count == 1 and context >= request.num_prompt_tokens:
                decodes += 1
                kv += context + 1
            else:
                tokens, contexts, sequences = tokens + count, contexts + context, sequences + 1
                pairs += count * (context + count / 2)
        return tokens, contexts, pairs, sequences, decodes, kv

    def _write(self, kind: str, row: Any) -> None:
        self._log.write(json.dumps([kind, row]) + "\n")


class AsyncStepRecorder(StepRecorder, AsyncScheduler):  # type: ignore[misc]
    """The same for the scheduler that is one step ahead."""
