"""What other servers have: their endpoints, and the fields of their requests.

Tests hold the fields of OpenAI and Anthropic against their SDKs, field by field, and those of vLLM and SGLang against their
packages where these are installed (`tests/real_engines`). Not checked, as there is nothing to install: Dynamo's fields, which
are all of OpenAI's besides those named here, and the table of endpoints. Both were read from sources in autumn 2026.
"""

from serving.frontend.api.kinds import KindName

SDKS = {"OpenAI": ("openai", "3.57.0"), "Anthropic": ("anthropic", "2.14.0")}
"""Their SDKs, and the versions whose fields are those below."""

ENDPOINTS: dict[str, str] = {
    "/v1/chat/completions": "OpenAI vLLM SGLang Dynamo",
    "/v1/completions": "OpenAI vLLM SGLang Dynamo",
    "/v1/responses": "OpenAI vLLM SGLang Dynamo",
    "/v1/messages": "Anthropic vLLM SGLang Dynamo",
    "/v1/messages/count_tokens": "Anthropic vLLM SGLang",
    "/v1/embeddings": "OpenAI vLLM SGLang Dynamo",
    "/v1/score": "vLLM SGLang",
    "/v1/rerank": "vLLM SGLang",
    "/v1/models": "OpenAI vLLM SGLang Dynamo",
    "/tokenize": "vLLM SGLang",
    "/detokenize": "vLLM SGLang",
    "/tokenizer_info": "vLLM",
    "/model_info": "SGLang",
    "/version": "vLLM",
    "/health": "vLLM SGLang Dynamo",
    "/live": "Dynamo",
    "/metrics": "vLLM SGLang Dynamo",
    "/openapi.json": "vLLM SGLang Dynamo",
    "/v1/audio/transcriptions": "OpenAI vLLM SGLang",
    "/v1/images/generations": "OpenAI Dynamo",
    "/v1/moderations": "OpenAI",
    "/classify": "vLLM SGLang",
    "/pooling": "vLLM",
    "/generate": "SGLang",
}
"""Who has an endpoint; those that one of them has, not each of its own."""

FIELDS: dict[KindName, dict[str, str]] = {
    "chat": {
        "OpenAI": """
            audio frequency_penalty function_call functions logit_bias logprobs max_completion_tokens max_tokens
            messages metadata modalities model moderation n parallel_tool_calls prediction presence_penalty
            prompt_cache_key prompt_cache_options prompt_cache_retention reasoning_effort response_format
            safety_identifier seed service_tier stop store stream stream_options temperature tool_choice tools
            top_logprobs top_p user verbosity web_search_options
        """,
        "vLLM": """
            add_generation_prompt add_special_tokens allowed_token_ids bad_words cache_salt chat_template
            chat_template_kwargs continue_final_message documents ec_transfer_params echo frequency_penalty
            ignore_eos include_reasoning include_stop_str_in_output kv_transfer_params length_penalty logit_bias
            logprob_token_ids logprobs max_completion_tokens max_tokens media_io_kwargs messages min_p min_tokens
            mm_payload mm_processor_kwargs model n parallel_tool_calls presence_penalty priority prompt_logprobs
            reasoning_effort repetition_detection repetition_penalty request_id response_format return_mm_kwargs
            return_prompt_text return_token_ids return_token_offsets return_tokens_as_token_ids
            routed_experts_prompt_start seed session_id skip_special_tokens spaces_between_special_tokens stop
            stop_token_ids stream stream_interval stream_options structured_outputs temperature
            thinking_token_budget tool_choice tools top_k top_logprobs top_p truncate_prompt_tokens truncation_side
            use_beam_search user vllm_xargs watermarking
        """,
        "SGLang": """
            bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs continue_final_message
            custom_logit_processor custom_params data_parallel_rank disagg_prefill_dp_rank ebnf extra_key
            frequency_penalty ignore_eos images_config input_ids logit_bias logprobs lora_path max_completion_tokens
            max_dynamic_patch max_tokens messages min_dynamic_patch min_p min_tokens mm_processor_kwargs model n
            no_stop_trim parallel_tool_calls presence_penalty priority reasoning_effort regex repetition_penalty
            response_format return_cached_tokens_details return_flat_raw_output_top_logprobs
            return_flat_raw_top_logprobs_b64 return_hidden_states return_input_ids_in_sglext return_meta_info
            return_output_ids_in_sglext return_prompt_token_ids return_routed_experts return_sampling_mask
            return_spec_tokens_details return_token_ids rid routed_dp_rank routed_experts_start_len
            sampling_logprobs_mode seed separate_reasoning session_id session_params skip_special_tokens stop
            stop_regex stop_token_ids stream stream_options stream_reasoning task temperature thinking tool_choice
            tools top_k top_logprobs top_p use_audio_in_video user video_config watermark
        """,
        "Dynamo": """
            chat_template_args chat_template_kwargs guided_choice guided_decoding_backend guided_grammar guided_json
            guided_regex guided_whitespace_pattern ignore_eos include_stop_str_in_output media_io_kwargs min_p
            min_tokens mm_processor_kwargs nvext repetition_penalty return_tokens_as_token_ids skip_special_tokens
            thinking top_k
        """,
    },
    "completion": {
        "OpenAI": """
            best_of echo frequency_penalty logit_bias logprobs max_tokens model n presence_penalty prompt seed stop
            stream stream_options suffix temperature top_p user
        """,
        "vLLM": """
            add_special_tokens allowed_token_ids bad_words cache_salt ec_transfer_params echo frequency_penalty
            ignore_eos include_stop_str_in_output kv_transfer_params length_penalty logit_bias logprob_token_ids
            logprobs max_tokens min_p min_tokens mm_payload model n presence_penalty priority prompt prompt_embeds
            prompt_logprobs repetition_detection repetition_penalty request_id response_format return_mm_kwargs
            return_token_ids return_token_offsets return_tokens_as_token_ids routed_experts_prompt_start seed
            session_id skip_special_tokens spaces_between_special_tokens stop stop_token_ids stream stream_interval
            stream_options structured_outputs suffix temperature thinking_token_budget top_k top_p
            truncate_prompt_tokens truncation_side use_beam_search user vllm_xargs watermarking
        """,
        "SGLang": """
            best_of bootstrap_host bootstrap_port bootstrap_room cache_salt custom_labels custom_logit_processor
            custom_params data_parallel_rank disagg_prefill_dp_rank ebnf echo extra_key frequency_penalty ignore_eos
            images_config json_schema logit_bias logprobs lora_path max_tokens min_p min_tokens mm_processor_kwargs
            model n no_stop_trim presence_penalty priority prompt regex repetition_penalty response_format
            return_cached_tokens_details return_hidden_states return_routed_experts return_spec_tokens_details
            return_token_ids rid routed_dp_rank routed_experts_start_len seed session_id session_params
            skip_special_tokens stop stop_regex stop_token_ids stream stream_options suffix temperature top_k top_p
            user watermark
        """,
        "Dynamo": """
            guided_choice guided_decoding_backend guided_grammar guided_json guided_regex guided_whitespace_pattern
            ignore_eos include_stop_str_in_output min_p min_tokens nvext repetition_penalty skip_special_tokens
            top_k
        """,
    },
    "response": {
        "OpenAI": """
            access_programs background background_options context_management conversation image include input
            instructions max_output_tokens max_tool_calls metadata model moderation parallel_tool_calls
            previous_response_id prompt prompt_cache_key prompt_cache_options prompt_cache_retention reasoning
            safety_identifier service_tier store stream stream_options temperature text tool_choice tools
            top_logprobs top_p truncation user
        """,
        "vLLM": """
            background cache_salt chat_template_kwargs ec_transfer_params enable_response_messages frequency_penalty
            ignore_eos include include_reasoning include_stop_str_in_output input instructions kv_transfer_params
            logit_bias max_output_tokens max_tool_calls media_io_kwargs metadata min_p mm_payload
            mm_processor_kwargs model parallel_tool_calls presence_penalty previous_input_messages
            previous_response_id priority prompt prompt_cache_key reasoning repetition_penalty request_id
            return_mm_kwargs seed service_tier session_id skip_special_tokens stop stop_token_ids store stream
            structured_outputs temperature text tool_choice tools top_k top_logprobs top_p truncation user
            vllm_xargs watermarking
        """,
        "SGLang": """
            background bootstrap_host bootstrap_port bootstrap_room cache_salt chat_template_kwargs
            data_parallel_rank disagg_prefill_dp_rank extra_key frequency_penalty include input instructions
            max_output_tokens max_tool_calls metadata min_p model parallel_tool_calls presence_penalty
            previous_response_id priority reasoning repetition_penalty request_id routed_dp_rank service_tier
            session_id stop store stream temperature text tool_choice tools top_k top_logprobs top_p truncation user
        """,
    },
    "message": {
        "Anthropic": """
            cache_control container diagnostics inference_geo max_tokens messages metadata model output_config
            service_tier speed stop_sequences stream system thinking tool_choice tools user_profile_id workspace_id
        """,
        "vLLM": """
            cache_salt chat_template_kwargs ec_transfer_params kv_transfer_params max_tokens messages metadata
            mm_payload model output_config return_mm_kwargs stop_sequences stream system temperature thinking
            tool_choice tools top_k top_p vllm_xargs watermarking
        """,
    },
    "embedding": {
        "OpenAI": """
            dimensions encoding_format input model user
        """,
        "vLLM": """
            add_special_tokens cache_salt dimensions embed_dtype encoding_format endianness input
            mm_processor_kwargs model padding priority request_id truncate_prompt_tokens truncation_side
            use_activation user
        """,
        "SGLang": """
            dimensions embed_override_token_id embed_overrides encoding_format input lora_path model priority rid
            user
        """,
    },
}
"""The fields of each kind of request, by who has them."""


def fields_of(kind: KindName, server: str) -> frozenset[str]:
    """Return the fields that a server's requests of a kind have."""
    own = frozenset(FIELDS[kind][server].split())
    return own | fields_of(kind, "OpenAI") if server == "Dynamo" else own
