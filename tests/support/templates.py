"""Chat templates of our own, of the kinds that models with tools have today, and conversations for them."""

import copy
import json
from pathlib import Path

from tests.support.template_families import FAMILIES

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Wetter <hier> & „dort“",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}

CONSTRUCTS = {
    "hermes": """
        {%- if tools %}<tools>
        {%- for tool in tools %}{{ "\\n" ~ tool | tojson }}{% endfor %}
        </tools>{% endif %}
        {%- for message in messages %}
        {%- if message.role == "tool" %}<tool_response>{{ message.content }}</tool_response>
        {%- else %}<|im_start|>{{ message.role }}{{ "\\n" ~ message.content }}
        {%- for call in message.tool_calls or [] %}
        <tool_call>{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}</tool_call>
        {%- endfor %}<|im_end|>
        {% endif %}
        {%- endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}""",
    "xml arguments": """
        {%- for message in messages %}{{ message.role }}: {{ message.content }}
        {%- for call in message.tool_calls or [] %}<call={{ call.function.name }}>
        {%- for name, value in call.function.arguments | items %}
        <arg={{ name }}>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg>
        {%- endfor %}</call>{% endfor %}
        {% endfor %}""",
    "items of arguments": """
        {%- for message in messages %}{% for call in message.tool_calls or [] %}
        {%- for name, value in call.function.arguments.items() %}{{ name }}={{ value }};{% endfor %}
        {%- endfor %}{% endfor %}""",
    "json of all kinds": """
        {%- if tools %}{{ tools | tojson(separators=(",", ":")) }}{{ tools | tojson(indent=2) }}
        {{- tools | tojson(ensure_ascii=True, sort_keys=True) }}{% endif %}{{ messages | length }}""",
    "generation": """
        {%- set who = "outer" %}{% for message in messages %}
        {%- if message.role == "assistant" %}{% generation %}{% set who = "inner" %}{{ message.content }}{% endgeneration %}
        {%- else %}{{ message.content }}{% continue %}{% endif %}{{ who }}
        {% endfor %}""",
    "reasoning": """
        {%- for message in messages %}
        {%- if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}{{ message.content }}
        {% endfor %}
        {%- if add_generation_prompt %}<|assistant|>
        {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}{% endif %}
        {{- reasoning_effort | default("none given") }}""",
    "documents": """
        {%- for document in documents or [] %}[{{ loop.index }}] {{ document.title }}: {{ document.text }}
        {% endfor %}{{ messages[-1].content }}""",
    "parts": """
        {%- for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}
        {%- for part in message.content %}[{{ part.text }}]{% endfor %}{% endif %}
        {% endfor %}""",
}

TEMPLATES = CONSTRUCTS | FAMILIES
"""By what they show, or the family of models whose templates are like it."""

USER = {"role": "user", "content": "Wie ist das Wetter in Zürich?"}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": {"city": "Zürich", "days": [1, 2]}},
}
AGENT = [
    {"role": "system", "content": "Be brief."},
    USER,
    {
        "role": "assistant",
        "content": "",
        "reasoning_content": "A tool knows.",
        "tool_calls": [CALL, copy.deepcopy(CALL)],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "rain"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]}]

CONVERSATIONS = {
    "plain": ([USER], None, {}),
    "agent": (AGENT, [TOOL], {}),
    "without thinking": ([USER], None, {"enable_thinking": False, "reasoning_effort": "low"}),
}
"""Messages, tools and variables."""

SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

PROMPTS = json.loads((Path(__file__).parent / "prompts.json").read_text())
"""The prompts of all of these that transformers 5.19 rendered, with the start of an answer."""
