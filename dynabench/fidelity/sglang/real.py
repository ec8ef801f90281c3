"""An installed SGLang's own scheduler in this process, stepped by hand. Only the forward pass is faked.

Its loops (`event_loop_normal`, `event_loop_overlap`) are repeated here, because they never return. What runs is SGLang's:
`Scheduler`, `SchedulePolicy`, `PrefillAdder`, the radix cache, the allocators, and the processing of results.
"""

import contextlib
import gc
import importlib
import json
import logging
import os
from array import array
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch
from zlib import crc32

from dynabench.fidelity.recordings import Json, RecordingError
from dynabench.fidelity.sglang.copies import Direction, by_hand, copies_of
from dynabench.fidelity.sglang.recordings import ENVIRONMENT, OURS
from foundation.text import one_line
from serving.engines.package import require
from serving.worker.engine import EngineError

VERSION = "0.5.23"
"""The SGLang whose scheduler is known. Others have other loops, and other names in them."""
FORMAT = "docs/engines.md#recording-sglangs-scheduler"
"""Where scenarios are described, and how to install SGLang without a GPU."""
ENQUEUE = "_add_request_to_queue"
"""SGLang's method that lets a request wait, new or come back."""
EOS = 2
VOCABULARY = 2000
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 1 << 20,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": EOS,
}
ARGUMENTS = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "device": "cpu",
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "dtype": "float32",
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.5,
    "kv_events_config": json.dumps({"publisher": "null"}),
    "max_total_tokens": 4096,
    "log_level": "error",
}


class InOrder(dict[Any, None]):
    """A set whose order is that of insertion. SGLang requeues the victims of preemption in that of a set, which is chance."""

    def __init__(self, items: Any = ()) -> None:
        super().__init__(dict.fromkeys(items))

    def add(self, item: Any) -> None:
        """Add an item."""
        self[item] = None


@contextlib.contextmanager
def environment(settings: Json) -> Iterator[None]:
    """Let SGLang read of its environment what a scenario sets (`ENVIRONMENT`), and nothing else of that."""
    with patch.dict("os.environ"):
        for name, variable in ENVIRONMENT.items():
            os.environ.pop(variable, None)
            if name in settings:
                os.environ[variable] = str(int(settings[name]))
        yield


def sglang() -> Any:
    """Import SGLang.

    Raises:
        RecordingError: it is not installed, not complete, or of another version.
    """
    try:
        package = require("sglang", "__version__")
        if package.__version__ == VERSION:
            require("sglang", "srt.managers.scheduler.Scheduler")
    except EngineError as error:
        raise RecordingError(f"{error}; without a GPU: see {FORMAT}") from error
    if package.__version__ != VERSION:
        raise RecordingError(
            f"SGLang {package.__version__} is installed; expected {VERSION}, whose loop is repeated here: "
            f"pip install --no-deps sglang=={VERSION}"
        )
    return package


def prepare_to_fork() -> None:
    """Import SGLang with all that its first scheduler would import, so that forks of this process have it.

    Raises:
        RecordingError: see `sglang`.
    """
    sglang()
    importlib.import_module("sglang.srt.models.registry")
    gc.freeze()  # a scheduler collects garbage, among all objects of these modules


class RealScheduler:
    """SGLang's scheduler. It takes requests and aborts, and goes through its loop once with `schedule` and `run`.

    A process can have one in its life: SGLang's own modules are changed for it, and logging is turned off.
    """

    is_made: ClassVar[bool] = False
    """Whether this process has had one."""

    def __init__(self, folder: Path, settings: Json) -> None:
        """Make one within `environment`.

        Args:
            folder: An empty folder for the description of its model.
            settings: Those of a scenario: `ServerArgs` and `OURS`; `overlap` is False without the overlap schedule.

        Raises:
            RecordingError: SGLang refuses the settings, or this process has had a scheduler.
        """
        if RealScheduler.is_made:
            raise RecordingError(
                "this process has had a scheduler of SGLang; record each scenario in a process of its own"
            )
        package = sglang()
        RealScheduler.is_made = True
        from sglang.srt.managers import schedule_policy, scheduler
        from sglang.srt.mem_cache import memory_pool
        from sglang.srt.runtime_context import SpawnRanks, publish
        from sglang.srt.server_args import PortArgs, ServerArgs

        logging.disable(logging.ERROR)  # it warns of each retraction, and prompts that are too long are errors to it
        schedule_policy.set = InOrder
        if "clip" in settings:  # SGLang may be imported already, which is when it reads the variable
            schedule_policy.CLIP_MAX_NEW_TOKENS = settings["clip"]
        (folder / "config.json").write_text(json.dumps(MODEL))
        given = {key: value for key, value in settings.items() if key not in OURS}
        try:
            arguments = ServerArgs(
                model_path=str(folder),
                **(ARGUMENTS | {"disable_overlap_schedule": not settings.get("overlap", False)} | given),
            )
            ports = PortArgs.init_new(arguments)
            publish(arguments, role="scheduler", ranks=SpawnRanks(world_rank=0, dp_rank=None, gpu_id=0))
            with (
                patch.object(scheduler, "SchedulerKvEventsPublisher", _NoPublisher),
                patch.object(memory_pool, "torch", _Untouched()),
                by_hand(),
            ):
                self.scheduler = scheduler.Scheduler(arguments, ports)
        except (TypeError, ValueError, AssertionError, ArithmeticError) as error:
            raise RecordingError(
                f"SGLang {package.__version__} rejects the settings of the scenario: {one_line(error)}"
            ) from error
        self.requeued: list[Any] = []
        self.aborted: list[str] = []
        self._copies = copies_of(self.scheduler)
        self._eos_at: dict[str, int] = {}
        self._in_flight: deque[int] = deque()
        self._watch()

    def _watch(self) -> None:
        """Fake the model, and listen to what SGLang sends to nobody."""
        real = self.scheduler
        real.result_queue = deque()
        real.enable_skip_finishing_decode = real.enable_overlap
        real.tp_worker.forward_batch_generation = self._forward
        real.send_abort_output = lambda _, request: self.aborted.append(request.rid)
        type(real.output_streamer).stream_output = lambda *_, **__: None  # it has slots
        enqueue = getattr(real, ENQUEUE)

        def noted(request: Any, *arguments: Any, **options: Any) -> None:
            self.requeued.append(request)
            enqueue(request, *arguments, **options)

        setattr(real, ENQUEUE, noted)
        real.tree_cache.take_events()

    def _forward(self, batch: Any, **_: Any) -> Any:
        import torch
        from sglang.srt.managers.utils import GenerationBatchResult

        places = zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True)
        tokens = [self.token(request.rid, length - len(request.origin_input_ids)) for request, length in places]
        return GenerationBatchResult(next_token_ids=torch.tensor(tokens, dtype=torch.int64))

    def token(self, id: str, place: int) -> int:
        """Return the token that the model makes at a place of a request's output."""
        return token_at(id, place, self._eos_at.get(id))

    # What is done before a step

    def add(self, action: Json) -> int:
        """Give it a request; return the limit on output tokens that SGLang then holds."""
        from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
        from sglang.srt.sampling.sampling_params import SamplingParams

        if "eos_at" in action:
            self._eos_at[action["id"]] = action["eos_at"]
        sampling = SamplingParams(
            max_new_tokens=action["max_new_tokens"], ignore_eos=action.get("ignore_eos", False), temperature=0.0
        )
        sampling.normalize(None)
        self.scheduler.handle_generate_request(
            TokenizedGenerateReqInput(
                rid=action["id"],
                input_text="",
                input_ids=array("q", action["prompt"]),
                input_embeds=None,
                mm_inputs=None,
                token_type_ids=None,
                sampling_params=sampling,
                return_logprob=False,
                logprob_start_len=-1,
                top_logprobs_num=0,
                token_ids_logprob=None,
                stream=False,
                priority=action.get("priority"),
                cache_salt=action.get("cache_salt"),
                extra_key=action.get("extra_key"),
            )
        )
        self.requeued.clear()
        return int(sampling.max_new_tokens)

    def abort(self, id: str) -> None:
        """Abort all requests whose names begin so."""
        from sglang.srt.managers.io_struct import AbortReq

        self.scheduler.abort_request(AbortReq(rid=id))

    def end_copy(self, direction: Direction) -> None:
        """Let the oldest copy of HiCache in a direction end; SGLang looks at the start of a step."""
        if self._copies is not None:
            self._copies.end_oldest(direction)

    def flush(self) -> bool:
        """Ask it to forget its cache; return whether it did."""
        return bool(self.scheduler.flush_cache())

    # Its loop

    def schedule(self) -> Any:
        """Return the next batch, if there is any."""
        real = self.scheduler
        self.requeued.clear()
        plan = real.get_next_batch_to_run(running_batch=real.running_batch, last_batch=real.last_batch)
        real.running_batch = plan.running_batch
        real.cur_batch_for_debug = plan.batch_to_run
        return plan.batch_to_run

    def run(self, batch: Any, step: int) -> tuple[Any, int] | None:
        """Run a batch, and process the result that is due, or rest; return the batch and the step whose result that was."""
        real = self.scheduler
        processed: tuple[Any, int] | None = None
        if not real.enable_overlap:
            if batch:
                real.process_batch_result(batch, real.run_batch(batch))
                processed = batch, step
            else:
                real.on_idle()
        else:
            is_synchronous = real.is_disable_overlap_for_batch(batch, last_batch=real.last_batch)
            if is_synchronous:
                processed = self._process()
            if batch:
                result = real.run_batch(batch)
                real.result_queue.append((batch.copy(), result))
                self._in_flight.append(step)
            if real.last_batch:
                if not is_synchronous:
                    processed = self._process()
            elif batch is None:
                real.on_idle()
        real.last_batch = batch
        return processed

    def _process(self) -> tuple[Any, int]:
        batch, result = self.scheduler.result_queue.popleft()
        self.scheduler.process_batch_result(batch, result)
        return batch, self._in_flight.popleft()


class _Untouched:
    """Stands for torch where SGLang makes its tables: zeros take no memory until they are written.

    SGLang's table of tokens has a place for each token that each row might have: gigabytes, of which a scenario uses little.
    """

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)

    def zeros(self, *size: Any, dtype: Any = None, device: Any = None) -> Any:
        """Return a tensor in memory that the system fills with zeros when it is used."""
        import numpy as np
        import torch

        shape = size[0] if len(size) == 1 else size
        assert torch.device(device or "cpu").type == "cpu", "nothing is computed on a GPU"
        return torch.from_numpy(np.zeros(shape, torch.empty(0, dtype=dtype).numpy().dtype))


def token_at(id: str, place: int, eos_at: int | None = None) -> int:
    """Return the token that the model makes at a place of a request's output."""
    if eos_at == place + 1:
        return EOS
    return EOS + 1 + (crc32(id.encode()) + 7 * place) % (VOCABULARY - EOS - 1)


class _NoPublisher:
    """Stands where SGLang publishes the events of its cache; they stay there until they are taken."""

    def __init__(self, **_: Any) -> None:
        self.enable_kv_cache_events = False
        self.was_asked = False

    def publish_kv_events(self) -> None:
        """Publish nothing, but note it."""
        self.was_asked = True

    def emit_kv_metrics(self) -> None:
        """Publish nothing."""
