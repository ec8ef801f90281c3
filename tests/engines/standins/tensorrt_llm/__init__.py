"""Stands in for TensorRT-LLM 1.x: what our adapter calls, with the names, arguments and answers of its source.

Its "model" answers with the prompt's tokens, one after the other, each plus one.
"""

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

LLM_ARGS = {
    "model", "tokenizer", "tokenizer_mode", "skip_tokenizer_init", "trust_remote_code", "tensor_parallel_size", "dtype",
    "revision", "tokenizer_revision", "backend", "gpus_per_node", "kv_cache_config", "max_seq_len", "max_batch_size",
    "max_num_tokens", "enable_iter_perf_stats", "enable_chunked_prefill", "cache_transceiver_config",
    "disable_overlap_scheduler", "guided_decoding_backend",
}  # fmt: skip
KV_CACHE = {
    "enable_block_reuse", "max_tokens", "free_gpu_memory_fraction", "host_cache_size", "event_buffer_max_size",
    "tokens_per_block", "dtype", "enable_partial_reuse",
}  # fmt: skip
TRANSCEIVER = {"backend", "transceiver_runtime", "max_tokens_in_buffer", "kv_transfer_timeout_ms"}
STEP_S = 0.002


@dataclass(slots=True, kw_only=True)
class SamplingParams:
    end_id: int | None = None
    pad_id: int | None = None
    max_tokens: int = 32
    bad: Any = None
    bad_token_ids: list[int] | None = None
    stop: Any = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    embedding_bias: Any = None
    n: int = 1
    best_of: int | None = None
    use_beam_search: bool = False
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    temperature: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    min_p: float | None = None
    logprobs: int | None = None
    ignore_eos: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    guided_decoding: Any = None


@dataclass
class Logprob:
    logprob: float
    rank: int | None = None


@dataclass(slots=True, kw_only=True)
class DisaggregatedParams:
    request_type: str | None = None
    first_gen_tokens: list[int] | None = None
    first_gen_log_probs: list | None = None
    first_gen_logits: list | None = None
    ctx_request_id: int | None = None
    opaque_state: bytes | None = None
    draft_tokens: list[int] | None = None
    disagg_request_id: int | None = None
    ctx_dp_rank: int | None = None
    ctx_info_endpoint: str | None = None
    schedule_style: int | None = None

    def __post_init__(self):
        assert self.request_type in (None, "context_only", "generation_only", "context_and_generation")


@dataclass(slots=True, kw_only=True)
class GuidedDecodingParams:
    json: Any = None
    regex: str | None = None
    grammar: str | None = None
    json_object: bool = False
    structural_tag: str | None = None


llmapi = SimpleNamespace(DisaggregatedParams=DisaggregatedParams, GuidedDecodingParams=GuidedDecodingParams)
executor = SimpleNamespace(result=SimpleNamespace(Logprob=Logprob))


@dataclass
class CompletionOutput:
    index: int = 0
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    finish_reason: str | None = None
    _last: int = 0

    @property
    def token_ids_diff(self):
        return self.token_ids[self._last :]

    @property
    def logprobs_diff(self):
        return self.logprobs[self._last :]


class RequestOutput:
    def __init__(self, tokens, parameters, cached, phase=None):
        self.disaggregated_params = None
        self._phase = phase
        self.outputs = [CompletionOutput()]
        self.cached_tokens = cached
        self.was_aborted = False
        self._tokens, self._parameters = tokens, parameters

    def abort(self) -> None:
        self.was_aborted = True

    def __aiter__(self):
        return self

    def __await__(self):
        return self._whole().__await__()

    async def _whole(self):
        async for _ in self:
            pass
        if self._phase is not None and self._tokens[0] != 13:  # which is out of luck
            one = self.outputs[0]
            self.disaggregated_params = DisaggregatedParams(
                request_type="context_only",
                first_gen_tokens=one.token_ids[:1],
                first_gen_log_probs=one.logprobs[:1] or None,
                ctx_request_id=self._phase.disagg_request_id,
                disagg_request_id=self._phase.disagg_request_id,
                opaque_state=b"\x80\x00state",
                ctx_dp_rank=0,
            )
        return self

    async def __anext__(self):
        one, parameters = self.outputs[0], self._parameters
        if one.finish_reason is not None:
            raise StopAsyncIteration
        await asyncio.sleep(STEP_S)
        while self._tokens[0] == 14 and not self.was_aborted:  # a prompt that takes its time
            await asyncio.sleep(STEP_S)
        one._last = len(one.token_ids)
        token = self._tokens[one._last % len(self._tokens)] + 1
        is_given = one._last == 0 and self._phase is not None and self._phase.request_type == "generation_only"
        if is_given:
            [token] = self._phase.first_gen_tokens
        one.token_ids.append(token)
        if is_given and self._phase.first_gen_log_probs:
            one.logprobs += self._phase.first_gen_log_probs
        elif parameters.logprobs is not None:
            one.logprobs.append(
                {token + rank: Logprob(-0.5 - rank, rank + 1) for rank in range(max(parameters.logprobs, 1))}
            )
        if len(one.token_ids) == parameters.max_tokens:
            one.finish_reason = "length"
        elif token in (parameters.stop_token_ids or ()) and len(one.token_ids) > (parameters.min_tokens or 0):
            one.finish_reason = "stop"
        return self


class LLM:
    latest = None

    def __init__(self, model, tokenizer=None, tokenizer_mode="auto", skip_tokenizer_init=False, **kwargs):
        for key in kwargs:
            if key not in LLM_ARGS:
                raise ValueError(f"LLM got invalid argument: {key}")
        for key in kwargs["kv_cache_config"]:
            if key not in KV_CACHE:
                raise ValueError(f"KvCacheConfig got invalid argument: {key}")
        for key in kwargs.get("cache_transceiver_config", ()):
            if key not in TRANSCEIVER:
                raise ValueError(f"CacheTransceiverConfig got invalid argument: {key}")
        self.arguments = {"model": model, "skip_tokenizer_init": skip_tokenizer_init, **kwargs}
        self.results = []
        self.phases = []
        self.was_shut_down = False
        self._size = kwargs["kv_cache_config"]["tokens_per_block"]
        self._held = {}
        created = {"type": "created", "num_blocks_per_cache_level": [100, 0]}
        self._events = [{"event_id": 0, "data": created, "window_size": 4096}]
        LLM.latest = self

    def generate_async(
        self,
        inputs,
        sampling_params=None,
        lora_request=None,
        prompt_adapter_request=None,
        streaming=False,
        kv_cache_retention_config=None,
        disaggregated_params=None,
        _postproc_params=None,
        scheduling_params=None,
        cache_salt=None,
    ):
        if disaggregated_params is not None:
            assert "cache_transceiver_config" in self.arguments
            assert streaming == (disaggregated_params.request_type == "generation_only")
        self.phases.append(disaggregated_params)
        assert isinstance(inputs, list)
        assert sampling_params.end_id is not None, "without a tokenizer an end_id is required"
        if len(inputs) + sampling_params.max_tokens > 400:
            raise ValueError(f"The sum of prompt length ({len(inputs)}) and max_tokens should not exceed 400")
        result = RequestOutput(inputs, sampling_params, self._store(inputs), disaggregated_params)
        self.results.append(result)
        return result

    def _store(self, tokens):
        """Keep the prompt's blocks, the last perhaps not full; tell of the new ones; return how many tokens were there."""
        parent, cached, new, first_parent = None, 0, [], None
        for start in range(0, len(tokens), self._size):
            block = (parent, tuple(tokens[start : start + self._size]))
            name = hash(block) & 0xFFFF_FFFF_FFFF_FFFF
            if name in self._held:
                cached += len(block[1])
            else:
                if not new:
                    first_parent = parent
                new.append((name, block[1]))
                self._held[name] = block
            parent = name
        if new:
            blocks = [
                {
                    "type": "stored_block",
                    "block_hash": name,
                    "tokens": [{"type": "unique_token", "token_id": token, "token_extra_id": 0} for token in block],
                    "cache_level": 0,
                    "priority": 35,
                }
                for name, block in new
            ]
            self._tell({"type": "stored", "parent_hash": first_parent, "blocks": blocks})
        return min(cached, len(tokens) - 1)

    def forget(self, *names):
        for name in names:
            del self._held[name]
        self._tell({"type": "removed", "block_hashes": list(names)})

    def _tell(self, data, window=4096):
        self._events.append({"event_id": len(self._events), "data": data, "window_size": window})

    async def get_kv_cache_events_async(self, timeout=2):
        events, self._events = self._events, []
        for event in events:
            yield event

    async def get_stats_async(self, timeout=2):
        busy = sum(result.outputs[0].finish_reason is None and not result.was_aborted for result in self.results)
        yield {
            "iter": 1,
            "numActiveRequests": busy,
            "numQueuedRequests": 0,
            "maxNumActiveRequests": 64,
            "kvCacheStats": {"usedNumBlocks": len(self._held), "maxNumBlocks": 100},
        }

    def shutdown(self) -> None:
        self.was_shut_down = True
