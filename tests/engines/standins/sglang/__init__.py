"""Stands in for SGLang 0.5.23: what our adapter calls, with the names, arguments and answers of its source.

Its "model" answers with the prompt's tokens, one after the other, each plus one.
"""

import asyncio
import ctypes
import json
import os
import signal
import struct
import subprocess
import threading
from types import SimpleNamespace

import msgspec
import zmq

SERVER_ARGS = {
    "model_path", "skip_tokenizer_init", "incremental_streaming_output", "page_size", "context_length", "tp_size",
    "base_gpu_id", "nnodes", "node_rank", "dist_init_addr", "dp_size", "disable_radix_cache", "kv_events_config",
    "log_level", "max_running_requests", "mem_fraction_static", "host", "disaggregation_mode",
    "disaggregation_transfer_backend", "disaggregation_bootstrap_port", "disaggregation_ib_device",
    "disaggregation_decode_enable_radix_cache", "enable_hierarchical_cache", "hicache_ratio", "hicache_size",
    "hicache_write_policy", "hicache_storage_backend", "grammar_backend",
    "enable_deterministic_inference",
}  # fmt: skip
SAMPLING = {
    "max_new_tokens", "stop", "stop_token_ids", "stop_regex", "temperature", "top_p", "top_k", "min_p",
    "frequency_penalty", "presence_penalty", "repetition_penalty", "min_new_tokens", "n", "beam_width", "json_schema",
    "regex", "ebnf", "structural_tag", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "no_stop_trim", "stream_interval", "logit_bias", "sampling_seed", "custom_params", "watermark",
}  # fmt: skip
CONTEXT = 400
STEP_S = 0.002

rooms = {}
"""By host, port and number: what a decode engine said of its blocks, and a prefill engine of token 1."""


def _die_with_parent():
    ctypes.CDLL("libc.so.6").prctl(1, signal.SIGKILL)


class TokenizerManager:
    def __init__(self):
        self.aborted = []

    def abort_request(self, rid: str = "", abort_all: bool = False):
        self.aborted.append(rid)


def aborted(message, status):
    reason = {"type": "abort", "message": message, "status_code": status}
    return {"output_ids": [], "meta_info": {"finish_reason": reason, "cached_tokens": 0}}


class Engine:
    latest = None

    def __init__(self, **kwargs):
        if "server_args" in kwargs:
            kwargs = vars(kwargs["server_args"])
        if unknown := kwargs.keys() - SERVER_ARGS:
            raise TypeError(f"ServerArgs.__init__() got an unexpected keyword argument {sorted(unknown)[0]!r}")
        self.arguments = kwargs
        self.server_args = SimpleNamespace(
            skip_tokenizer_init=kwargs.get("skip_tokenizer_init", False),
            grammar_backend=kwargs.get("grammar_backend"),
        )
        self.environment = dict(os.environ)
        self.mode = kwargs.get("disaggregation_mode", "null")
        assert self.mode in ("null", "prefill", "decode")
        self.tokenizer_manager = TokenizerManager()
        self.asked = []
        self.was_shut_down = False
        Engine.latest = self
        # SGLang's processes ask to be killed with the thread that started them.
        self.scheduler = subprocess.Popen(["sleep", "600"], preexec_fn=_die_with_parent)
        if kwargs.get("node_rank", 0) > 0:
            self.scheduler.wait()  # the nodes that follow serve nobody, and stay in here
        self._lock = threading.Lock()
        self._publisher = None
        if "kv_events_config" in kwargs:
            config = json.loads(kwargs["kv_events_config"])
            assert config["publisher"] == "zmq"
            self._publisher = zmq.Context.instance().socket(zmq.XPUB)
            assert not any(wild in config["endpoint"] for wild in ("*", "::", "0.0.0.0"))
            self._number = 0
            self._send([{"type": "AllBlocksCleared"}])  # lost: nobody has subscribed yet
            self._publisher.connect(config["endpoint"])  # as SGLang does for a host that is no wildcard
        self._held = {}

    async def async_generate(
        self,
        prompt=None,
        sampling_params=None,
        input_ids=None,
        image_data=None,
        audio_data=None,
        video_data=None,
        mm_hashes=None,
        mm_content_hashes=None,
        return_logprob=False,
        logprob_start_len=None,
        top_logprobs_num=None,
        token_ids_logprob=None,
        lora_path=None,
        custom_logit_processor=None,
        require_reasoning=False,
        return_hidden_states=False,
        return_routed_experts=False,
        routed_experts_start_len=0,
        stream=False,
        bootstrap_host=None,
        bootstrap_port=None,
        bootstrap_room=None,
        routed_dp_rank=None,
        disagg_prefill_dp_rank=None,
        kv_hints=None,
        data_parallel_rank=None,
        external_trace_header=None,
        rid=None,
        session_params=None,
        priority=None,
        session_id=None,
        *,
        cache_salt=None,
    ):
        if unknown := sampling_params.keys() - SAMPLING:
            raise TypeError(f"unexpected sampling parameter {sorted(unknown)[0]!r}")
        self.asked.append({"rid": rid, "rank": routed_dp_rank, "input_ids": input_ids, **sampling_params})
        if self.mode == "null":
            answers = self._generate(input_ids, sampling_params, return_logprob, top_logprobs_num)
        else:
            place = (bootstrap_host, bootstrap_port, bootstrap_room)
            meet = self._prefill if self.mode == "prefill" else self._decode
            answers = meet(place, rid, input_ids, sampling_params, return_logprob, top_logprobs_num)
        return answers if stream else await anext(answers)

    async def _prefill(self, place, rid, tokens, *more):
        """As SGLang: wait for the other side's blocks, and end, with a length of 0, once all was sent."""
        if place[2] is None:
            yield aborted("Invalid request: Disaggregated request received without bootstrap room id.", 400)
            return
        meeting = rooms.setdefault(place, {"has_blocks": asyncio.Event(), "token": asyncio.Future()})
        while not meeting["has_blocks"].is_set():
            if rid in self.tokenizer_manager.aborted:
                return
            await asyncio.sleep(STEP_S)
        if tokens[0] == 13:
            meeting["token"].set_result(None)
            yield aborted("Prefill transfer failed", 500)
            return
        meeting["token"].set_result(tokens[0] + 1)
        facts = {"finish_reason": {"type": "length", "length": 0}, "prompt_tokens": len(tokens)}
        yield {"output_ids": [tokens[0] + 1], "meta_info": facts | {"cached_tokens": self._store(tokens)}}

    async def _decode(self, place, rid, tokens, *more):
        if place[2] is None:
            yield aborted("Invalid request: Disaggregated request received without bootstrap room id.", 400)
            return
        meeting = rooms.setdefault(place, {"has_blocks": asyncio.Event(), "token": asyncio.Future()})
        meeting["has_blocks"].set()
        while not meeting["token"].done():
            if rid in self.tokenizer_manager.aborted:
                return
            await asyncio.sleep(STEP_S)
        if (token := meeting["token"].result()) is None:
            yield aborted("Decode transfer failed", 500)
            return
        assert token == tokens[0] + 1
        async for answer in self._generate(tokens, *more):
            yield answer

    async def _generate(self, tokens, parameters, with_logprobs, num_top):
        if len(tokens) >= CONTEXT:
            message = f"The input ({len(tokens)} tokens) is longer than the model's context length ({CONTEXT} tokens)."
            raise ValueError(message)
        while self._publisher is not None and not self._publisher.poll(0):
            await asyncio.sleep(STEP_S)  # until somebody subscribes: what is sent before is lost
        cached = self._store(tokens)
        if tokens[0] == 13:
            yield aborted("out of luck", 500)
            return
        count = parameters["max_new_tokens"]
        ends = set(parameters.get("stop_token_ids") or ())
        so_far = []
        for place in range(count):
            await asyncio.sleep(STEP_S)
            token = tokens[place % len(tokens)] + 1
            reason = {"type": "length", "length": count} if place == count - 1 else None
            so_far.append(token)
            if token in ends and not parameters["ignore_eos"] and place >= parameters["min_new_tokens"]:
                reason = {"type": "stop", "matched": token}
            facts = {"id": "x", "finish_reason": reason, "prompt_tokens": len(tokens), "cached_tokens": cached}
            if with_logprobs:
                facts["output_token_logprobs"] = [(-0.5, token, None)]
                facts["output_top_logprobs"] = [[(-0.5 - rank, token + rank, None) for rank in range(num_top)]]
            yield {
                "output_ids": [token] if self.arguments.get("incremental_streaming_output") else [*so_far],
                "meta_info": facts,
            }
            if reason is not None:
                return

    def _store(self, tokens):
        """Keep the prompt's whole pages, tell of the new ones; return how many tokens were there."""
        size, parent, cached, new = self.arguments.get("page_size", 1), None, 0, []
        first_parent = None
        for start in range(0, len(tokens) // size * size, size):
            page = (parent, tuple(tokens[start : start + size]))
            name = hash(page)
            if name in self._held:
                cached += size
            else:
                if not new:
                    first_parent = parent
                new.append((name, page[1]))
                self._held[name] = page
            parent = name
        if new and self._publisher is not None:
            event = {
                "type": "BlockStored",
                "block_hashes": [name for name, _ in new],
                "parent_block_hash": first_parent,
                "token_ids": [token for _, page in new for token in page],
                "block_size": size,
                "lora_id": None,
                "medium": "GPU",
            }
            self._send([event])
        return min(cached, len(tokens) - 1)

    def forget_all(self):
        self._held.clear()
        self._send([{"type": "AllBlocksCleared"}])

    def _send(self, events):
        with self._lock:
            payload = msgspec.msgpack.encode([0.0, events, 0])
            self._publisher.send_multipart([b"", struct.pack(">q", self._number), payload])
            self._number += 1

    def shutdown(self):
        self.was_shut_down = True
        self.scheduler.kill()
        self.scheduler.wait()
        if self._publisher is not None:
            self._publisher.close(0)
