"""What a stand-in does with each argument of `vllm serve`, in one table.

    modelled            it sets something here
    harmless            it is accepted, changes nothing that is simulated, and is named once in the log
    refused with --gpu  it would change step times or memory in a way that is not simulated: refused where --gpu
                        predicts them; without --gpu, step times are no GPU's, and it is harmless
    refused             it would change schedules, answers or routes in a way that is not simulated

Only values that differ from vLLM's defaults are refused.
"""

import functools
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple

Kind = Literal["modelled", "harmless", "refused with --gpu", "refused"]


class Treatment(NamedTuple):
    """What is done with an argument, and why."""

    kind: Kind
    about: str
    """What it sets, why it changes nothing, or why it is refused, and the way out."""


MODELLED = {
    # Model
    "model_tag": "the model: a folder, or a Hugging Face id",
    "model": "the model, as its first word does",
    "served_model_name": "the names that clients may ask for",
    "tokenizer": "the folder or Hugging Face id of the tokenizer",
    "max_model_len": "the most tokens of a sequence; auto: as many as fit in the KV cache, at most the model's context",
    "dtype": "the type of weights and activations: 16 bits are simulated",
    "quantization": "the type of the weights: fp8 of a model in 16 bits, else the checkpoint's own",
    "seed": "the seed of faults, unless --fault-seed names another",
    "max_num_queued_reqs": "the requests that may be unfinished before more get 503",
    "max_num_queued_tokens": "the tokens of prompts that may wait before more requests get 503",
    "max_logprobs": "the most log probabilities of a token that requests may ask for",
    "generation_config": "whose sampling parameters count for requests that name none",
    "override_generation_config": "sampling parameters of requests that name none",
    # Engine
    "tensor_parallel_size": "the GPUs that share each layer",
    "data_parallel_size": "the data-parallel ranks",
    "data_parallel_size_local": "the ranks that run here",
    "data_parallel_rank": "the one rank that runs here; something in front chooses between ranks",
    "data_parallel_start_rank": "the first rank that runs here",
    "data_parallel_hybrid_lb": "that something in front chooses between hosts, each with several ranks",
    "data_parallel_external_lb": "that something in front chooses between ranks",
    "enable_expert_parallel": "that each GPU has whole experts",
    "all2all_backend": "the default of max_num_batched_tokens (256 with deepep_low_latency and nixl_ep)",
    "block_size": "the tokens in a KV block",
    "gpu_memory_utilization": "the share of the GPU's memory for weights, activations and KV",
    "kv_cache_memory_bytes": "the memory of each GPU for KV",
    "num_gpu_blocks_override": "the KV blocks",
    "kv_cache_dtype": "the type of the KV: 16 bits or FP8",
    "enable_prefix_caching": "whether KV of equal prefixes is used again",
    "max_num_batched_tokens": "the most tokens of a step",
    "max_num_scheduled_tokens": "the same as max_num_batched_tokens, and only with its value",
    "max_num_seqs": "the most sequences that run at once",
    "max_num_active_seqs": "a tighter limit on running sequences",
    "long_prefill_token_threshold": "the longest prefill chunk while other requests are present",
    "long_prefill_token_threshold_adaptive": "whether that grows when few requests are present",
    "scheduling_policy": "the order of admission",
    "enable_chunked_prefill": "whether a prompt may be computed over several steps",
    "scheduler_reserve_full_isl": "whether a sequence is admitted only if its whole prompt fits",
    "watermark": "the share of blocks that admission keeps free",
    "async_scheduling": "whether a step is scheduled while the one before it runs",
    "performance_mode": "throughput: twice as many sequences and tokens in a step by default",
    "kv_offloading_size": "the host memory for KV (GiB)",
    "kv_transfer_config": "handover of KV with NixlConnector, host memory with OffloadingConnector, or a MultiConnector of both",
    "prefix_caching_hash_algo": "how blocks are named in KV events",
    "kv_events_config": "where KV events are published",
    # Adapters
    "enable_lora": "whether requests may name adapters",
    "lora_modules": "the adapters that are served from the start",
    "max_loras": "the adapters that may run in one step",
    "max_lora_rank": "the highest rank of an adapter",
    # Server
    "config": "a YAML file with more flags; those of the command line win",
    "host": "the address to listen on",
    "port": "the port to listen on",
    "uds": "the Unix socket to listen on, instead",
    "api_key": "the keys of which clients must send one",
    "root_path": "the path under which a proxy shows the server",
    "ssl_keyfile": "the file of the TLS key",
    "ssl_certfile": "the file of the TLS certificate",
    "ssl_ca_certs": "the authorities that may sign clients' certificates",
    "ssl_cert_reqs": "whether clients need certificates",
    "ssl_ciphers": "the ciphers of TLS 1.2 and older",
    "allowed_origins": "the origins whose web pages may call",
    "allowed_methods": "the methods with which they may",
    "allowed_headers": "the headers that they may send",
    "allow_credentials": "whether they may send credentials",
    "enable_request_id_headers": "whether answers have X-Request-Id",
    "disable_fastapi_docs": "whether /docs and /openapi.json are missing",
    "shutdown_timeout": "how long requests in progress may take to finish after a signal",
    # Requests and answers
    "chat_template": "the chat template",
    "default_chat_template_kwargs": "arguments of the chat template that requests may replace",
    "trust_request_chat_template": "whether requests may bring a chat template",
    "response_role": "the role of answers",
    "return_tokens_as_token_ids": "how log probabilities name tokens",
    "enable_auto_tool_choice": "whether the model may choose to call tools",
    "exclude_tools_when_tool_choice_none": "whether prompts lack tools that may not be called",
    "tool_call_parser": "the format of tool calls",
    "reasoning_parser": "the format of reasoning",
    "structured_outputs_config": "the format of reasoning, if it names one; how answers are constrained is the same",
    "enable_prompt_tokens_details": "whether usage says how many tokens were cached",
    "enable_per_request_metrics": "whether answers have the times of their request",
    "enable_server_load_tracking": "whether /load counts",
    "enable_force_include_usage": "whether every stream ends with the usage",
    "enable_tokenizer_info_endpoint": "whether /tokenizer_info is there",
    "fingerprint_mode": "what system_fingerprint is",
    "fingerprint_value": "the fingerprint itself",
    # Logs and metrics
    "disable_log_stats": "whether there are metrics of the engine",
}  # fmt: skip
"""What each argument sets."""

HARMLESS = {
    "no weights are loaded": """
        load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads
        safetensors_prefetch_block_size model_loader_extra_config ignore_patterns use_tqdm_on_load pt_load_map_location
        max_parallel_loading_workers weight_transfer_config enable_ep_weight_filter engram_config
        allow_deprecated_quantization model_impl model_class_overrides sleep_preserve_parameter_names
    """,
    "no model code runs": """
        trust_remote_code code_revision worker_cls worker_extension_cls additional_config enable_cumem_allocator
        sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_trace_replay jit_monitor_mode jit_monitor_verbose
        watermark_config disable_cascade_attn use_fp64_gumbel
    """,
    "nothing is downloaded by it; --tokenizer names a folder or an id": """
        revision tokenizer_revision hf_token config_format
    """,
    "step times are those of the kernels that vLLM chooses itself": """
        attention_backend attention_config kernel_config ir_op_priority enable_flashinfer_autotune moe_backend
        linear_backend sparse_indexer_topk_backend gdn_prefill_backend kda_prefill_backend
        kda_decode_backend mamba_backend mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding
        mamba_cache_philox_rounds enable_batch_sharded_sampling disable_nccl_for_dp_synchronization use_replayssm replayssm_buffer_len enable_hc_sp
    """,
    "experts are simulated as evenly used": """
        enable_eplb eplb_config expert_placement_strategy
    """,
    "there are no GPUs and no other hosts to reach": """
        master_addr master_port node_rank distributed_timeout_seconds cpu_distributed_timeout_seconds numa_bind
        numa_bind_nodes numa_bind_cpus device_ids data_parallel_address data_parallel_rpc_port data_parallel_backend
        distributed_executor_backend ray_workers_use_nsight enable_shm_tensor_arena dp_sync_interval
    """,
    "it counts only beside an argument that is refused": """
        dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size cp_kv_cache_interleave_size
        dbo_decode_token_threshold dbo_prefill_token_threshold elastic_ep_max_dp_size
        fault_tolerance_config data_parallel_supervisor_port dp_supervisor_probe_interval_s
        dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold ec_manager_config
        offload_backend cpu_offload_params offload_group_size offload_prefetch_step offload_params
        per_request_spec_decode_metrics
    """,
    "one process serves": "api_server_count renderer_num_workers",
    "variables of the environment that are not known are ignored": "fail_on_environ_validation",
    "images, video and audio are not simulated, and requests with them are refused": """
        trust_request_mm_kwargs allowed_local_media_path allowed_media_domains language_model_only
        limit_mm_per_prompt enable_mm_embeds media_io_kwargs mm_processor_kwargs mm_processor_cache_gb
        mm_processor_cache_type mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only
        mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path
        mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin interleave_mm_strings skip_mm_profiling
        video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb
        mm_device_do_normalize disable_chunked_mm_input default_mm_loras enable_tower_connector_lora
    """,
    "adapters have no weights": """
        lora_dtype fully_sharded_loras lora_target_modules specialize_active_lora enable_mixed_moe_lora_format
        enable_moe_shared_loras max_lora_cls_labels max_cpu_loras
    """,
    "answers are made up, so how they are scored or constrained changes little": """
        tool_strict_level logprobs_mode reasoning_config
        anthropic_disabled_thinking_effort cohere_is_reasoning_model cohere_format enable_flash_late_interaction
        pooler_config
    """,
    "there is no GPU to trace or to profile": """
        enable_layerwise_nvtx_tracing profiler_config collect_detailed_traces
    """,
    "it shapes log lines of vLLM that are not written: calls, requests and answers are not logged": """
        enable_log_requests enable_log_outputs enable_log_deltas max_log_len uvicorn_log_level
        disable_uvicorn_access_log disable_access_log_for_endpoints
        aggregate_engine_logging enable_logging_iteration_details log_error_stack logging_config log_level
        log_config_file
    """,
    "a request's head may have 16 KiB and 100 headers in any case": "h11_max_incomplete_event_size h11_max_header_count",
    "the docs need no network in any case": "enable_offline_docs",
    "/sleep and /wake_up are there with VLLM_SERVER_DEV_MODE in any case": "enable_sleep_mode",
}  # fmt: skip
"""Why arguments change nothing, and which."""

GPU = "step times of --gpu are those of vLLM's defaults"
REFUSED_WITH_GPU = {
    "enforce_eager": f"{GPU}, with CUDA graphs; leave it out, or use a --timing-file that was measured so",
    "optimization_level": f"{GPU} (-O2); leave it out, or use a --timing-file that was measured so",
    "compilation_config": f"{GPU}; leave it out, or use a --timing-file that was measured so",
    "cudagraph_capture_sizes": f"{GPU}; leave it out, or use a --timing-file that was measured so",
    "max_cudagraph_capture_size": f"{GPU}; leave it out, or use a --timing-file that was measured so",
    "enable_dbo": f"{GPU}, without overlap of two half batches; leave it out",
    "ubatch_size": f"{GPU}, without overlap of parts of a batch; leave it out",
    "disable_custom_all_reduce": f"{GPU}, with its own all-reduce; leave it out",
    "kv_sharing_fast_prefill": f"{GPU}, which compute all layers of a prompt; leave it out",
    "quantization_config": "with --gpu, weights have the checkpoint's type; name a checkpoint that is stored so",
    "hf_overrides": "with --gpu, the shape is that of the config.json; put the change there, and name it with --model-shape",
    "hf_config_path": "with --gpu, the shape comes from the model; name another with --model-shape",
    "kv_cache_dtype_skip_layers": "with --gpu, the KV of all layers has one type; leave it out",
    "cpu_offload_gb": "with --gpu, all weights are on the GPU; leave it out",
    "offload_num_in_group": "with --gpu, all weights are on the GPU; leave it out",
    "mamba_cache_dtype": "with --gpu, states have the model's type; leave it out",
    "mamba_ssm_cache_dtype": "with --gpu, states have the model's type; leave it out",
    "disable_sliding_window": "with --gpu, windows are those of the config.json; put the change there, and name it with --model-shape",
    "disable_hybrid_kv_cache_manager": "with --gpu, layers with windows share the pool as by default; leave it out",
}  # fmt: skip
"""Why arguments cannot be honoured where a GPU's times and memory are predicted, and the way out."""

SPECULATIVE = "speculative decoding is not simulated: steps would be too short or too long; leave it out"
CONTEXT_PARALLEL = "context parallelism is not simulated; use --tensor-parallel-size"
PLUGIN = "code of yours does not run in a stand-in; leave it out"
POOLING = "models that only embed or classify are not simulated; use --runner generate"
REFUSED = {
    "speculative_config": SPECULATIVE,
    "spec_method": SPECULATIVE,
    "spec_model": SPECULATIVE,
    "spec_tokens": SPECULATIVE,
    "diffusion_config": "models that diffuse text are not simulated; leave it out",
    "pipeline_parallel_size": "engines with several stages are not simulated; use --tensor-parallel-size",
    "decode_context_parallel_size": CONTEXT_PARALLEL,
    "prefill_context_parallel_size": CONTEXT_PARALLEL,
    "nnodes": "a stand-in is a whole instance, however many hosts that would span; leave it out",
    "headless": "engines without a server are part of another instance, which a stand-in has in itself; do not start it",
    "data_parallel_multi_port_external_lb": "one stand-in has one port; start one for each rank, with --data-parallel-rank",
    "enable_elastic_ep": "ranks cannot be added to a running stand-in; start it with the number that you want",
    "enable_fault_tolerance": "ranks do not fail on their own; leave it out",
    "grpc": "only HTTP is answered; leave it out",
    "grpc_port": "only HTTP is answered; leave it out",
    "stream_interval": "streams write each token as it comes; leave it out",
    "sse_keep_alive_interval": "idle streams get no comments; leave it out",
    "chat_template_content_format": "content is given as the template seems to expect; use auto",
    "enable_ssl_refresh": "changed TLS files are not loaded again; leave it out, and start again with new ones",
    "scheduler_cls": "only vLLM's own scheduler is simulated; leave it out",
    "prefill_schedule_interval": "prefills are admitted in every step; leave it out",
    "prefix_cache_retention_interval": "prefixes of layers with windows or states are kept as by default; leave it out",
    "prefix_match_unit": "prefixes are found block by block; leave it out",
    "mamba_block_size": "blocks of states are sized as by default; leave it out",
    "mamba_cache_mode": "states are cached as by default; leave it out",
    "enable_mamba_shared_prefix_checkpoint": "states are cached as by default; leave it out",
    "swa_bounded_replay": "windows are cached as by default; leave it out",
    "kv_offloading_backend": "only host memory of vLLM's own is simulated; use native",
    "ec_transfer_config": "encoders on other instances are not simulated; leave it out",
    "runner": POOLING,
    "convert": POOLING,
    "skip_tokenizer_init": "texts are tokenized, with bytes as tokens if there is no tokenizer; leave it out",
    "tokenizer_mode": "tokenizers are read from tokenizer.json; leave it out",
    "enable_prompt_embeds": "prompts are text or token ids; leave it out",
    "enable_return_routed_experts": "no experts are routed; leave it out",
    "aux_output_config": "no experts are routed; leave it out",
    "return_sampling_mask": "nothing is sampled from a distribution; leave it out",
    "logits_processors": PLUGIN,
    "io_processor_plugin": PLUGIN,
    "tool_parser_plugin": PLUGIN,
    "reasoning_parser_plugin": PLUGIN,
    "middleware": PLUGIN,
    "tool_server": "tools are not run; leave it out",
    "tokens_only": "the routes of tokens in and out are not answered; leave it out",
    "enable_scale_out": "the routes of tokens in and out are not answered; leave it out",
    "otlp_traces_endpoint": "no traces are sent; leave it out",
    "show_hidden_metrics_for_version": "hidden metrics are not there; leave it out",
    "custom_histogram_buckets": "histograms have vLLM's buckets; leave it out",
    "kv_cache_metrics": "how long blocks live is not measured; leave it out",
    "kv_cache_metrics_sample": "how long blocks live is not measured; leave it out",
    "cudagraph_metrics": "there are no CUDA graphs to count; leave it out",
    "enable_mfu_metrics": "operations are not counted; leave it out",
}  # fmt: skip
"""Why arguments cannot be honoured, and the way out."""


@functools.cache
def treatments() -> Mapping[str, Treatment]:
    """Return what is done with each argument, by its name in vLLM."""
    return dict(_entries())


def _entries() -> Iterator[tuple[str, Treatment]]:
    """Yield the entries of all tables; a test holds them against vLLM's parser."""
    yield from ((name, Treatment("modelled", about)) for name, about in MODELLED.items())
    yield from ((name, Treatment("harmless", why)) for why, names in HARMLESS.items() for name in names.split())
    yield from ((name, Treatment("refused with --gpu", why)) for name, why in REFUSED_WITH_GPU.items())
    yield from ((name, Treatment("refused", why)) for name, why in REFUSED.items())
