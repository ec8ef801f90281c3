"""Formats of models' calls and reasoning, by vLLM's names of their parsers."""

import re
from collections.abc import Mapping
from dataclasses import replace

from serving.model.parsers.call_format import CallFormat
from serving.model.parsers.harmony import Harmony
from serving.model.parsers.header_calls import HeaderCalls
from serving.model.parsers.json_calls import JsonCalls
from serving.model.parsers.python_calls import PythonCalls
from serving.model.parsers.tag_calls import TagCalls
from serving.model.parsers.thoughts import Thoughts

_hermes = JsonCalls(starts=("<tool_call>",), ends=("</tool_call>",))
_llama = JsonCalls(starts=("<|python_tag|>",), bare="{", between="; ", key="parameters")
_in_array = JsonCalls(starts=("<tool_calls>",), ends=("</tool_calls>",), is_array=True)
_qwen_coder = TagCalls(
    start="<tool_call>",
    function="<function=",
    name_end=">",
    parameter="<parameter=",
    key_end=">",
    value_end="</parameter>",
    function_end="</function>",
    end="</tool_call>",
    has_lines=True,
)
_seed = replace(_qwen_coder, start="<seed:tool_call>", end="</seed:tool_call>")
_glm = TagCalls(
    start="<tool_call>",
    parameter="<arg_key>",
    key_end="</arg_key>",
    value_start="<arg_value>",
    value_end="</arg_value>",
    function_end="</tool_call>",
)
_minimax = TagCalls(
    start="<minimax:tool_call>",
    function="<invoke name=",
    name_end=">",
    parameter="<parameter name=",
    key_end=">",
    value_end="</parameter>",
    function_end="</invoke>",
    end="</minimax:tool_call>",
    quote='"',
)
_step = TagCalls(
    start="<｜tool_calls_begin｜>",
    function="<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name=",
    name_end=">",
    parameter="<steptml:parameter name=",
    key_end=">",
    value_end="</steptml:parameter>",
    function_end="</steptml:invoke><｜tool_call_end｜>",
    end="<｜tool_calls_end｜>",
    quote='"',
)


def _dsml(section: str) -> TagCalls:
    return TagCalls(
        start=f"<｜DSML｜{section}>",
        function="<｜DSML｜invoke name=",
        name_end=">",
        parameter="<｜DSML｜parameter name=",
        key_end=">",
        value_end="</｜DSML｜parameter>",
        function_end="</｜DSML｜invoke>",
        end=f"</｜DSML｜{section}>",
        quote='"',
        has_kinds=True,
    )


_deepseek_v3 = HeaderCalls(
    starts=("<｜tool▁calls▁begin｜>",),
    call="<｜tool▁call▁begin｜>",
    kind="function<｜tool▁sep｜>",
    separators=("\n```json\n",),
    call_end="\n```<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_deepseek_v31 = HeaderCalls(
    starts=("<｜tool▁calls▁begin｜>",),
    call="<｜tool▁call▁begin｜>",
    separators=("<｜tool▁sep｜>",),
    call_end="<｜tool▁call▁end｜>",
    end="<｜tool▁calls▁end｜>",
)
_kimi = HeaderCalls(
    starts=("<|tool_calls_section_begin|>",),
    call="<|tool_call_begin|>",
    separators=("<|tool_call_argument_begin|>",),
    call_end="<|tool_call_end|>",
    end="<|tool_calls_section_end|>",
    name=re.compile(r"\s*(?:functions\.)?([\w.:/-]+?):\d+\s*\Z"),
    template="functions.{name}:{index}",
    has_id=True,
)
_mistral = HeaderCalls(starts=("[TOOL_CALLS]",), separators=("{", "[ARGS]"), has_objects=True)

CALLS: Mapping[str, CallFormat] = {
    "hermes": _hermes,
    "qwen3_json": _hermes,
    "granite4": _hermes,
    "ernie45": _hermes,
    "longcat": JsonCalls(starts=("<longcat_tool_call>",), ends=("</longcat_tool_call>",)),
    "llama3_json": _llama,
    "llama4_json": _llama,
    "mistral": _mistral,
    "granite": JsonCalls(starts=("<|tool_call|>", "<tool_call>"), is_array=True),
    "jamba": _in_array,
    "hunyuan_a13b": _in_array,
    "phi4_mini_json": JsonCalls(starts=("functools",), is_array=True),
    "xlam": JsonCalls(starts=("<tool_call>", "```json"), ends=("</tool_call>", "```"), bare="[", is_array=True),
    "internlm": JsonCalls(starts=("<|action_start|><|plugin|>",), ends=("<|action_end|>",), key="parameters"),
    "deepseek_v3": _deepseek_v3,
    "deepseek_v31": _deepseek_v31,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": _kimi,
    "qwen3_coder": _qwen_coder,
    "qwen3_xml": _qwen_coder,
    "step3p5": _qwen_coder,
    "seed_oss": _seed,
    "glm45": _glm,
    "glm47": _glm,
    "minimax_m2": _minimax,
    "step3": _step,
    "pythonic": PythonCalls(),
    "llama4_pythonic": PythonCalls(start="<|python_start|>", end="<|python_end|>"),
    "olmo3": PythonCalls(start="<function_calls>", end="</function_calls>", has_lines=True),
    "openai": Harmony(),
}

_think = Thoughts()
_think_or_call = Thoughts(ends_with_calls=True)

REASONING: Mapping[str, Thoughts | Harmony] = {
    "deepseek_r1": _think,
    "deepseek_v3": Thoughts(begins=False),
    "holo2": _think,
    "qwen3": _think_or_call,
    "glm45": _think_or_call,
    "glm47": _think_or_call,
    "kimi_k2": _think_or_call,
    "minimax_m2": _think_or_call,
    "olmo3": _think,
    "step3": _think,
    "step3p5": _think_or_call,
    "ernie45": Thoughts(noise=("<response>\n", "\n</response>")),
    "seed_oss": Thoughts(starts=("<seed:think>",), ends=("</seed:think>",), ends_with_calls=True),
    "mistral": Thoughts(starts=("[THINK]",), ends=("[/THINK]",), begins=False, ends_with_calls=True),
    "granite": Thoughts(
        starts=("Here is my thought process:", "Here's my thought process:"),
        ends=("Here is my response:", "Here's my response:"),
        begins=False,
    ),
    "hunyuan_a13b": Thoughts(
        starts=("<think>\n",), ends=("\n</think>\n<answer>\n",), begins=False, noise=("\n</answer>",)
    ),
    "openai_gptoss": Harmony(),
}
