"""Requests, good and bad, by which the stand-in is compared with the real `vllm serve`."""

import base64
from typing import Any, NamedTuple

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
"""A chat template that opens the reasoning of answers."""

PLAIN = ("--served-model-name", "tiny", "other")
FULL = (
    "--served-model-name=tiny",
    "--enable-prompt-tokens-details",
    "--enable-auto-tool-choice",
    "--tool-call-parser=hermes",
    "--reasoning-parser=qwen3",
    "--enable-request-id-headers",
    "--enable-per-request-metrics",
    "--scheduling-policy=priority",
    "--enable-force-include-usage",
    "--trust-request-chat-template",
    f"--chat-template={TEMPLATE}",
)
SERVERS = {"plain": PLAIN, "full": FULL}
"""The flags of the servers that answer; each request goes to both."""

CONTEXT = 512
"""Their --max-model-len."""


class Case(NamedTuple):
    """One request."""

    path: str
    body: Any
    """As JSON; bytes are sent as they are."""
    headers: dict[str, str] = {}  # noqa: RUF012 (nobody changes it)
    method: str = "POST"


def completion(**fields: Any) -> Case:
    """Ask for a completion of exactly four letters, unless the fields say otherwise."""
    asked = {"model": "tiny", "prompt": "Hello there", **FOUR_LETTERS} | fields
    return Case(COMPLETIONS, {name: value for name, value in asked.items() if value is not ...})


def chat(**fields: Any) -> Case:
    """The same for a chat."""
    asked = {"model": "tiny", "messages": [USER], **FOUR_LETTERS} | fields
    return Case(CHATS, {name: value for name, value in asked.items() if value is not ...})


def streamed(case: Case, **options: Any) -> Case:
    """Have an answer streamed."""
    return case._replace(body=case.body | {"stream": True} | ({"stream_options": options} if options else {}))


def both(name: str, **fields: Any) -> dict[str, Case]:
    """Return the same request as a completion and as a chat."""
    return {f"completion: {name}": completion(**fields), f"chat: {name}": chat(**fields)}


FOUR_LETTERS = {"max_tokens": 4, "ignore_eos": True, "allowed_token_ids": [70, 71, 72]}
"""Sampling of random weights that gives a text of four tokens, each a character: a, b or c."""

USER = {"role": "user", "content": "Hello there"}
TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "parameters": {"type": "object", "properties": {"at": {"type": "string"}}, "required": ["at"]},
    },
}
EMBEDS = base64.b64encode(b"nothing").decode()
LONG = "word " * 2000

CASES: dict[str, Case] = {
    # whole and streamed
    **both("whole"),
    "completion: streamed": streamed(completion()),
    "chat: streamed": streamed(chat()),
    "completion: usage": streamed(completion(), include_usage=True),
    "chat: usage": streamed(chat(), include_usage=True),
    "completion: usage all along": streamed(completion(), include_usage=True, continuous_usage_stats=True),
    "chat: usage all along": streamed(chat(), include_usage=True, continuous_usage_stats=True),
    "completion: empty stream options": streamed(completion(stream_options={})),
    "completion: stream options of a whole answer": completion(stream_options={"include_usage": True}),
    "chat: stream options of a whole answer": chat(stream_options={"include_usage": True}),
    # limits
    **both("no max_tokens but a limit by itself", max_tokens=None, min_tokens=2, max_completion_tokens=3),
    **both("max_tokens 0", max_tokens=0),
    **both("max_tokens -1", max_tokens=-1),
    **both("max_tokens as a text", max_tokens="4"),
    **both("max_tokens as a word", max_tokens="four"),
    **both("max_tokens 4.0", max_tokens=4.0),
    **both("max_tokens 4.5", max_tokens=4.5),
    **both("max_tokens that equal the context", max_tokens=CONTEXT),
    **both("max_tokens beyond the context", max_tokens=CONTEXT + 1),
    **both("min_tokens over max_tokens", min_tokens=5),
    **both("min_tokens below zero", min_tokens=-1),
    "completion: default max_tokens": completion(max_tokens=...),
    "completion: max_tokens null": completion(max_tokens=None),
    "completion: prompt too long": completion(prompt=LONG),
    "completion: prompt of as many tokens as the context": completion(prompt=[5] * CONTEXT),
    "completion: prompt of one token less": completion(prompt=[7] * (CONTEXT - 1)),
    "completion: prompt of one token more": completion(prompt=[5] * (CONTEXT + 1)),
    "completion: prompt too long, streamed": streamed(completion(prompt=LONG)),
    "chat: prompt too long": chat(messages=[{"role": "user", "content": LONG}]),
    # sampling
    **{
        key: case
        for name, value in [
            ("temperature", -0.1), ("temperature", 2.1), ("temperature", "hot"), ("temperature", 0), ("top_p", 0),
            ("top_p", 1.1), ("top_k", -2), ("top_k", 0), ("min_p", 1.5), ("presence_penalty", 2.5),
            ("frequency_penalty", -2.5), ("repetition_penalty", 0), ("seed", 7), ("seed", 1 << 64), ("n", 0), ("n", -1),
            ("n", "two"), ("logit_bias", {"70": 200}), ("logit_bias", {"a": 1}), ("logit_bias", {"5000": 1}),
            ("stop_token_ids", [5000]), ("stop_token_ids", ["a"]), ("allowed_token_ids", [7]), ("allowed_token_ids", []),
            ("allowed_token_ids", [5000]), ("bad_words", ["c"]), ("bad_words", [""]), ("bad_words", "a"), ("stop", ""),
            ("stop", ["", "b"]), ("stop", 5), ("stop", []), ("truncate_prompt_tokens", 2), ("truncate_prompt_tokens", -1),
            ("truncate_prompt_tokens", -2), ("truncate_prompt_tokens", CONTEXT + 1), ("truncation_side", "middle"),
            ("priority", 0), ("priority", 1), ("priority", "high"), ("cache_salt", ""), ("cache_salt", "a/b"),
            ("cache_salt", "salt"), ("vllm_xargs", {"a": 1}), ("vllm_xargs", {"a": {}}), ("vllm_xargs", 5),
            ("repetition_detection", {"max_pattern_size": 2, "min_count": 1}), ("thinking_token_budget", 5),
            ("thinking_token_budget", -2), ("thinking_token_budget", -1), ("mm_processor_kwargs", {"a": 1}), ("logits_processors", ["a.b"]),
            ("kv_transfer_params", {"do_remote_decode": True}), ("kv_transfer_params", 5), ("stream_interval", 0), ("user", "me"),
            ("user", 5), ("best_of", 2), ("nonsense", {"a": 1}), ("guided_json", {}), ("ignore_eos", "yes"),
            ("ignore_eos", "maybe"), ("skip_special_tokens", False), ("spaces_between_special_tokens", False),
            ("use_beam_search", False), ("length_penalty", "a"), ("include_stop_str_in_output", True),
            ("return_token_ids", True), ("request_id", "mine"), ("request_id", 5), ("session_id", "s"), ("echo", True),
            ("add_special_tokens", False), ("metadata", {"a": 1}), ("service_tier", "flex"), ("suffix", "."), ("stream", None),
            ("stream", "sure"), ("response_format", {"type": "json_schema"}), ("response_format", {"type": "poem"}),
            ("response_format", {"type": "text"}), ("response_format", 5),
            ("structured_outputs", {"regex": "[ab]{3}", "json": {}}), ("structured_outputs", {}),
            ("structured_outputs", {"regex": "("}),
            ("return_prompt_text", True), ("logprob_token_ids", [5]),
        ]
        for key, case in both(f"{name} {value!r}", **{name: value}).items()
    },
    **both("greedy and two answers", temperature=0, n=2),
    **both("two answers", n=2, seed=1),
    "completion: two answers, streamed": streamed(completion(n=2, seed=1), include_usage=True),
    "chat: two answers, streamed": streamed(chat(n=2, seed=1), include_usage=True),
    **both("a repetition ends it", allowed_token_ids=[70], repetition_detection={"max_pattern_size": 1, "min_count": 3}),
    **both("a token ends it", allowed_token_ids=[70], stop_token_ids=[70]),
    **both("a text ends it", allowed_token_ids=[70], stop=["aa"]),
    **both("a text ends it and is shown", allowed_token_ids=[70], stop=["aa"], include_stop_str_in_output=True),
    **both("EOS ends it", allowed_token_ids=[1], ignore_eos=False),
    **both("EOS is ignored", allowed_token_ids=[1]),
    **both("EOS is ignored and shown", allowed_token_ids=[1], skip_special_tokens=False),
    "completion: a token ends it, streamed": streamed(completion(allowed_token_ids=[70], stop_token_ids=[70])),
    "chat: a token ends it, streamed": streamed(chat(allowed_token_ids=[70], stop_token_ids=[70])),
    "completion: a text ends it, streamed": streamed(completion(allowed_token_ids=[70], stop=["aa"])),
    "chat: a text ends it, streamed": streamed(chat(allowed_token_ids=[70], stop=["aa"])),
    "completion: EOS ends it, streamed": streamed(completion(allowed_token_ids=[1], ignore_eos=False)),
    "completion: a token out of the vocabulary ends it, streamed": streamed(completion(stop_token_ids=[5000])),
    "chat: a token out of the vocabulary ends it, streamed": streamed(chat(stop_token_ids=[5000])),
    "completion: temperature 3, streamed": streamed(completion(temperature=3)),
    "completion: token ids, streamed": streamed(completion(return_token_ids=True)),
    "chat: token ids, streamed": streamed(chat(return_token_ids=True)),
    # log-probabilities
    **both("log-probabilities of the prompt", prompt_logprobs=1),
    **both("prompt_logprobs -2", prompt_logprobs=-2),
    **both("prompt_logprobs 30", prompt_logprobs=30),
    **both("prompt_logprobs as a text", prompt_logprobs="a"),
    "completion: prompt_logprobs, streamed": streamed(completion(prompt_logprobs=1)),
    "completion: logprobs 0": completion(logprobs=0),
    "completion: logprobs 2": completion(logprobs=2, temperature=0),
    "completion: logprobs 20": completion(logprobs=20, temperature=0),
    "completion: logprobs 21": completion(logprobs=21),
    "completion: logprobs -2": completion(logprobs=-2),
    "completion: logprobs, streamed": streamed(completion(logprobs=2, temperature=0)),
    "completion: tokens as ids": completion(logprobs=1, return_tokens_as_token_ids=True, temperature=0),
    "completion: echo with logprobs": completion(echo=True, logprobs=1, temperature=0),
    "completion: echo with logprobs, streamed": streamed(completion(echo=True, logprobs=1, temperature=0)),
    "completion: echo without answer": completion(echo=True, max_tokens=0),
    "completion: echo, streamed": streamed(completion(echo=True)),
    "completion: echo of tokens": completion(echo=True, prompt=[40, 41, 42]),
    "completion: echo with token ids": completion(echo=True, return_token_ids=True),
    "chat: logprobs": chat(logprobs=True, temperature=0),
    "chat: logprobs and top_logprobs": chat(logprobs=True, top_logprobs=2, temperature=0),
    "chat: logprobs, streamed": streamed(chat(logprobs=True, top_logprobs=2, temperature=0)),
    "chat: top_logprobs without logprobs": chat(top_logprobs=2),
    "chat: top_logprobs 21": chat(logprobs=True, top_logprobs=21),
    "chat: top_logprobs null": chat(logprobs=True, top_logprobs=None, temperature=0),
    "chat: tokens as ids": chat(logprobs=True, top_logprobs=1, return_tokens_as_token_ids=True, temperature=0),
    # prompts
    "completion: no prompt": completion(prompt=...),
    "completion: empty prompt": completion(prompt=""),
    "completion: empty list": completion(prompt=[]),
    "completion: list of an empty text": completion(prompt=[""]),
    "completion: prompt of tokens": completion(prompt=[40, 41, 42]),
    "completion: prompts": completion(prompt=["Hello", "there"]),
    "completion: prompts of tokens": completion(prompt=[[40, 41], [42]]),
    "completion: prompts, streamed": streamed(completion(prompt=["Hello", "there"]), include_usage=True),
    "completion: prompt out of the vocabulary": completion(prompt=[5000]),
    "completion: prompt below zero": completion(prompt=[-1]),
    "completion: prompt out of the vocabulary, streamed": streamed(completion(prompt=[5000])),
    "completion: prompt of a wrong type": completion(prompt=5),
    "completion: mixed prompt": completion(prompt=["a", 5]),
    "completion: embeddings as prompt": completion(prompt_embeds=EMBEDS),
    "completion: only embeddings as prompt": completion(prompt=..., prompt_embeds=EMBEDS),
    "completion: beams that stream": streamed(completion(use_beam_search=True)),
    # messages
    "chat: no messages": chat(messages=...),
    "chat: empty messages": chat(messages=[]),
    "chat: messages of a wrong type": chat(messages="hello"),
    "chat: unknown role": chat(messages=[{"role": "wizard", "content": "hi"}]),
    "chat: no role": chat(messages=[{"content": "hi"}]),
    "chat: no content": chat(messages=[{"role": "user"}]),
    "chat: content null": chat(messages=[{"role": "user", "content": None}]),
    "chat: parts": chat(messages=[{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]),
    "chat: part of an unknown type": chat(messages=[{"role": "user", "content": [{"type": "smell"}]}]),
    "chat: an image": chat(
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AA"}}]}]
    ),
    "chat: developer": chat(messages=[{"role": "developer", "content": "Be brief."}, USER]),
    "chat: thought before": chat(messages=[USER, {"role": "assistant", "content": "a", "reasoning": "b"}, USER]),
    "chat: thought before, by its old name": chat(
        messages=[USER, {"role": "assistant", "content": "a", "reasoning_content": "b"}, USER]
    ),
    "chat: answer to a tool": chat(messages=[USER, {"role": "tool", "content": "a", "tool_call_id": "x"}]),
    "chat: continues": chat(
        messages=[USER, {"role": "assistant", "content": "So"}], continue_final_message=True, add_generation_prompt=False
    ),
    "chat: continues and begins": chat(continue_final_message=True, add_generation_prompt=True),
    "chat: echo of what it continues": chat(
        messages=[USER, {"role": "assistant", "content": "So"}],
        continue_final_message=True, add_generation_prompt=False, echo=True,
    ),
    "chat: echo of what it continues, streamed": streamed(chat(
        messages=[USER, {"role": "assistant", "content": "So"}],
        continue_final_message=True, add_generation_prompt=False, echo=True,
    )),
    "chat: template": chat(chat_template="{{ messages[0].content }}"),
    "chat: broken template": chat(chat_template="{% if %}"),
    "chat: template variables": chat(chat_template_kwargs={"enable_thinking": False}),
    "chat: template as a variable": chat(chat_template_kwargs={"chat_template": "a"}),
    "chat: documents": chat(documents=[{"title": "a", "text": "b"}]),
    "chat: documents of a wrong type": chat(documents=["a"]),
    "chat: effort": chat(reasoning_effort="low"),
    "chat: unknown effort": chat(reasoning_effort="huge"),
    "chat: no reasoning": chat(include_reasoning=False),
    # tools
    "chat: tools": chat(tools=[TOOL]),
    "chat: no tools": chat(tools=[]),
    "chat: tools but none": chat(tools=[TOOL], tool_choice="none"),
    "chat: tools required": chat(tools=[TOOL], tool_choice="required", allowed_token_ids=..., max_tokens=60, temperature=0, ignore_eos=False),
    "chat: a tool by name": chat(
        tools=[TOOL], tool_choice={"type": "function", "function": {"name": "look"}}, allowed_token_ids=..., max_tokens=60, temperature=0,
        ignore_eos=False,
    ),
    "chat: an unknown tool by name": chat(tools=[TOOL], tool_choice={"type": "function", "function": {"name": "a"}}),
    "chat: choice without tools": chat(tool_choice="auto"),
    "chat: strange choice": chat(tools=[TOOL], tool_choice="perhaps"),
    "chat: tool of a wrong type": chat(tools=[5]),
    "chat: tool without function": chat(tools=[{"type": "function"}]),
    # the model
    **both("no model", model=...),
    **both("model null", model=None),
    **both("empty model", model=""),
    **both("other name", model="other"),
    **both("unknown model", model="unknown"),
    **both("model of a wrong type", model=5),
    "completion: unknown model, streamed": streamed(completion(model="unknown")),
    "chat: unknown model and bad temperature": chat(model="unknown", temperature=5),
    # HTTP
    "completion: not JSON": Case(COMPLETIONS, b"{"),
    "chat: not JSON": Case(CHATS, b"{'a'}"),
    "completion: a list": Case(COMPLETIONS, []),
    "chat: null": Case(CHATS, None),
    "completion: no body": Case(COMPLETIONS, b""),
    "completion: not UTF-8": Case(COMPLETIONS, b'{"model": "\xff"}'),
    "completion: as a text": completion()._replace(headers={"content-type": "text/plain"}),
    "completion: with a charset": completion()._replace(headers={"content-type": "application/json; charset=utf-8"}),
    "completion: GET": Case(COMPLETIONS, b"", method="GET"),
    "chat: PUT": chat()._replace(method="PUT"),
    "unknown path": Case("/v1/nothing", {}),
    "unknown path, GET": Case("/nothing", b"", method="GET"),
    "completion: slash at the end": completion()._replace(path=COMPLETIONS + "/"),
    "completion: its id": completion()._replace(headers={"x-request-id": "mine-1"}),
    "chat: its id": chat()._replace(headers={"x-request-id": "mine-2"}),
    "chat: its id, streamed": streamed(chat())._replace(headers={"x-request-id": "mine-3"}),
    "completion: two ids": completion(request_id="body")._replace(headers={"x-request-id": "head"}),
    "completion: rank 0": completion()._replace(headers={"x-data-parallel-rank": "0"}),
    "completion: rank 1": completion()._replace(headers={"x-data-parallel-rank": "1"}),
    "completion: rank 1, streamed": streamed(completion())._replace(headers={"x-data-parallel-rank": "1"}),
    "completion: rank x": completion()._replace(headers={"x-data-parallel-rank": "x"}),
    "completion: priority by header": completion()._replace(headers={"x-vllm-priority": "1"}),
    # the other APIs
    "response: whole": Case(RESPONSES, {"model": "tiny", "input": "Hello", "max_output_tokens": 4}),
    "response: streamed": Case(RESPONSES, {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "stream": True}),
    "response: unknown model": Case(RESPONSES, {"model": "unknown", "input": "Hello"}),
    "response: no input": Case(RESPONSES, {"model": "tiny"}),
    "response: bad temperature": Case(RESPONSES, {"model": "tiny", "input": "Hello", "temperature": 5}),
    "response: not JSON": Case(RESPONSES, b"{"),
    "message: whole": Case(MESSAGES, {"model": "tiny", "messages": [USER], "max_tokens": 4}),
    "message: streamed": Case(MESSAGES, {"model": "tiny", "messages": [USER], "max_tokens": 4, "stream": True}),
    "message: unknown model": Case(MESSAGES, {"model": "unknown", "messages": [USER], "max_tokens": 4}),
    "message: no messages": Case(MESSAGES, {"model": "tiny", "max_tokens": 4}),
    "message: no max_tokens": Case(MESSAGES, {"model": "tiny", "messages": [USER]}),
    "message: bad temperature": Case(MESSAGES, {"model": "tiny", "messages": [USER], "max_tokens": 4, "temperature": 5}),
    "message: not JSON": Case(MESSAGES, b"{"),
}  # fmt: skip

THINKS = "vLLM's parser takes any text without </think> for thought; ours only if the prompt has opened it"
RANDOM = "random weights do not come to the end of the arguments"
OTHER_API = "the answers of this API have a form of their own in vLLM"
TIMES = "the engine reports its times with the last token; the server ends this answer before"
DIFFERENT: dict[str, str] = {
    **dict.fromkeys(
        [
            "response: whole",
            "response: streamed",
            "response: no input",
            "response: not JSON",
            "message: whole",
            "message: streamed",
        ],
        OTHER_API,
    ),
}
"""Cases in which the stand-in is known to differ, and why."""

DIFFERENT_IF_FULL = {
    **dict.fromkeys(["chat: tools required", "chat: a tool by name"], RANDOM),
    **dict.fromkeys(
        [
            "chat: continues",
            "chat: echo of what it continues",
            "chat: echo of what it continues, streamed",
            "chat: template",
        ],
        THINKS,
    ),
    "chat: template variables": THINKS,
    "chat: broken template": "vLLM forgets the header of the id here",
    "chat: EOS is ignored and shown": "vLLM's parser drops the special tokens that it was asked to show",
    **{
        f"{kind}: a text ends it{more}": TIMES
        for kind in ("completion", "chat")
        for more in ("", ", streamed", " and is shown")
    },
}
"""The same for the server with all flags."""
