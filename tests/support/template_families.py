"""Chat templates of our own, each with the constructs of one family of public templates, which are not ours to copy."""

FAMILIES = {
    "llama 3": """
        {{- bos_token }}
        {%- if day is not defined %}{% set day = strftime_now("%d %b %Y") | length %}{% endif %}
        {%- if messages[0]["role"] == "system" %}
            {%- set rules, messages = messages[0]["content"] | trim, messages[1:] %}
        {%- else %}
            {%- set rules = "" %}
        {%- endif %}
        {{- "<|header|>system<|/header|>\\n\\n" ~ day ~ "\\n" + rules + "<|eot|>" }}
        {%- for tool in tools or [] %}{{ tool | tojson(indent=4) }}{{ "\\n\\n" }}{% endfor %}
        {%- for turn in messages %}
            {%- if "tool_calls" in turn %}
                {%- for call in turn.tool_calls %}
                    {{- '{"name": "' + call.function.name + '", "parameters": ' + call.function.arguments | tojson + "}" }}
                {%- endfor %}
            {%- elif turn.role == "tool" and (turn.content is mapping or turn.content is iterable) %}
                {{- "<|header|>ipython<|/header|>\\n\\n" ~ turn.content | tojson }}
            {%- else %}
                {{- "<|header|>" + turn["role"] + "<|/header|>\\n\\n" + turn["content"] | trim }}
            {%- endif %}
        {%- endfor %}""",
    "mistral": """
        {%- set asked = messages | selectattr("role", "equalto", "user") | list %}
        {%- set count = namespace(turns=0) %}
        {{- bos_token }}
        {%- for turn in messages %}
            {%- if turn.role == "user" %}
                {%- if count.turns % 2 != 0 %}{{ raise_exception("users and assistants take turns") }}{% endif %}
                {%- set count.turns = count.turns + 2 %}
                {%- if tools is not none and turn == asked[-1] %}[TOOLS] [
                    {%- for tool in tools %}{
                        {%- for key, value in tool.function.items() if key != "return" %}
                            {{- '"' + key + '": ' }}{{ '"' + value + '"' if value is string else value | tojson }}
                            {{- "}" if loop.last else ", " }}
                        {%- endfor %}
                        {{- "][/TOOLS]" if loop.last else ", " }}
                    {%- endfor %}
                {%- endif %}
                {{- "[INST] " + turn["content"] + "[/INST]" }}
            {%- elif turn.tool_calls is defined and turn.tool_calls is not none %}
                {%- for call in turn.tool_calls %}
                    {%- set written = call.function | tojson %}
                    {{- written[:-1] + ', "id": "' + call.id + '"}' + (eos_token if loop.last else ", ") }}
                {%- endfor %}
            {%- elif turn["role"] == "tool" %}
                {{- '[RESULTS] {"content": ' + turn.content | string | tojson + "}" }}
            {%- endif %}
        {%- endfor %}""",
    "deepseek": """
        {%- set state = namespace(rules="", is_calling=false, after_tool=false) %}
        {%- for turn in messages if turn["role"] == "system" %}
            {%- set state.rules = state.rules + ("\\n\\n" if state.rules else "") + turn["content"] %}
        {%- endfor %}
        {{- bos_token ~ state.rules }}
        {%- for turn in messages %}
            {%- if turn["role"] == "user" %}{{ "<｜User｜>" + turn["content"] }}{% endif %}
            {%- if turn["role"] == "assistant" and turn["tool_calls"] is defined and turn["tool_calls"] %}
                {%- for call in turn["tool_calls"] %}
                    {%- if not state.is_calling %}<｜calls▁begin｜>{% set state.is_calling = true %}{% endif %}
                    {{- call["function"]["name"] + "<｜sep｜>" + call["function"]["arguments"] | tojson }}
                {%- endfor %}
                {{- "<｜calls▁end｜>" + eos_token }}
            {%- elif turn["role"] == "assistant" %}
                {{- turn["content"].split("</think>", 1)[1] if "</think>" in turn["content"] else turn["content"] }}
            {%- endif %}
            {%- set state.after_tool = turn["role"] == "tool" %}
            {%- if state.after_tool %}{{ "<｜output｜>" + turn["content"] }}{% endif %}
        {%- endfor %}
        {%- if add_generation_prompt and not state.after_tool %}<｜Assistant｜>{{ "<think>" if thinking else "</think>" }}
        {%- endif %}""",
    "qwen3 coder": """
        {%- macro others(fields, known) %}
            {%- for key in fields if key not in known %}
                {%- set value = fields[key] %}
                {%- if value is mapping or (value is sequence and value is not string) %}
                    {%- set value = value | tojson | safe %}
                {%- endif %}
                {{- "\\n<" ~ key ~ ">" ~ (value | string) ~ "</" ~ key ~ ">" }}
            {%- endfor %}
        {%- endmacro %}
        {%- if tools is iterable and tools | length > 0 %}
            {%- for tool in tools %}
                {%- set tool = tool.function if tool.function is defined else tool %}
                {{- "<name>" ~ tool.name ~ "</name><about>" ~ (tool.description | trim) ~ "</about>" }}
                {%- for name, fields in tool.parameters.properties | items %}{{ name ~ others(fields, ["type"]) }}{% endfor %}
                {{- others(tool.parameters, ["type", "properties"]) }}
            {%- endfor %}
        {%- endif %}
        {%- for turn in messages %}
            {%- if turn.role == "tool" %}
                {%- if loop.previtem and loop.previtem.role != "tool" %}{{ "<|im_start|>user\\n" }}{% endif %}
                {{- "<tool_response>" + turn.content + "</tool_response>" }}
                {%- if loop.last or loop.nextitem.role != "tool" %}<|im_end|>{% endif %}
            {%- else %}
                {{- "<|im_start|>" + turn.role + "\\n" + turn.content }}
                {%- for call in turn.tool_calls or [] %}
                    {%- for name, value in call.function.arguments | items %}
                        {{- "<parameter=" + name + ">\\n" ~ (value if value is string else value | tojson | safe) }}
                    {%- endfor %}
                {%- endfor %}
            {%- endif %}
        {%- endfor %}""",
    "glm 4.5": """
        [gMASK]<sop>
        {%- macro shown(content) -%}
            {%- if content is string %}{{ content }}{% else %}
                {%- for part in content %}{{ part.text if part is mapping and part.type == "text" else part }}{% endfor %}
            {%- endif %}
        {%- endmacro -%}
        {%- set latest = namespace(user=-1) %}
        {%- for turn in messages %}{% if turn.role == "user" %}{% set latest.user = loop.index0 %}{% endif %}{% endfor %}
        {% for tool in tools or [] %}{{ tool | tojson(ensure_ascii=False) }}
        {% endfor %}
        {%- for turn in messages %}<|{{ turn.role }}|>
        {% if turn.role == "assistant" -%}
            {%- if loop.index0 > latest.user and turn.reasoning_content is string -%}
            <think>{{ turn.reasoning_content.strip() }}</think>
            {%- else -%}
            <think></think>{{ shown(turn.content).split("</think>")[-1].lstrip("\\n") }}
            {%- endif %}
        {% for call in turn.tool_calls or [] %}
        <tool_call>{{ call.function.name }}
        {% set given = call.function.arguments %}
        {% for key, value in given.items() %}<arg_key>{{ key }}</arg_key>
        <arg_value>{{ value | tojson(ensure_ascii=False) if value is not string else value }}</arg_value>
        {% endfor %}</tool_call>{% endfor %}
        {%- elif turn.role == "tool" and (loop.first or messages[loop.index0 - 1].role != "tool") -%}
        <result>{{ turn.content }}</result>
        {%- else -%}
            {{- shown(turn.content) }}
            {{- "/nothink" if enable_thinking is defined and not enable_thinking and not turn.content.endswith("/nothink") }}
        {%- endif %}
        {%- endfor %}""",
    "minimax m2": """
        {%- set begin, end = "<minimax:tool_call>", "</minimax:tool_call>" -%}
        {%- macro listed(kind, tools) -%}
            {%- for tool in tools -%}
            <tool kind="{{ kind }}">{{ tool.function | tojson(ensure_ascii=False) }}</tool>{{ "\\n" }}
            {%- endfor -%}
        {%- endmacro -%}
        {%- macro rules(turn) -%}{{ turn.content if turn and turn.content is string else "You help." }}{%- endmacro -%}
        {%- set first, turns = none, messages -%}
        {%- if messages and messages[0].role == "system" %}{% set first, turns = messages[0], messages[1:] %}{% endif -%}
        {{- "]~b]system" ~ "\\n" ~ rules(first) ~ (listed("function", tools) if tools) -}}
        {%- set called = namespace(name=none) -%}
        {%- for turn in turns -%}
            {%- if turn.role == "tool" -%}
                {%- if called.name is none %}{{ raise_exception("a result that nobody asked for") }}{% endif -%}
                <response>{{ turn.content }}</response>
            {%- else -%}
                {{- "]~b]" ~ turn.role ~ "\\n" ~ turn.content -}}
                {%- if turn.tool_calls -%}
                    {{- begin -}}
                    {%- for call in turn.tool_calls -%}
                        {%- for key, value in call.function.arguments.items() -%}
                            {{- '<parameter name="' + key + '">' -}}
                            {{- value | tojson(ensure_ascii=False) if value is not string else value -}}
                        {%- endfor -%}
                    {%- endfor -%}
                    {{- end -}}{%- set called.name = turn.tool_calls[-1].function.name -%}
                {%- endif -%}
            {%- endif -%}
        {%- endfor -%}
        {%- if add_generation_prompt %}{{ "]~b]ai" ~ "\\n" ~ "<think>" ~ "\\n" }}{% endif -%}""",
    "gpt-oss": """
        {%- macro kind(schema, is_nullable=false) -%}
            {%- if schema.type == "array" -%}
                {{- kind(schema["items"]) + "[]" if schema["items"] is defined else "any[]" }}
            {%- elif schema.type is iterable and schema.type is not string -%}{{ schema.type | join(" | ") }}
            {%- elif schema.enum -%}{{ '"' + schema.enum | join('" | "') + '"' }}
            {%- else -%}{{ schema.type or "any" }}{{ " | null" if is_nullable }}{% endif -%}
        {%- endmacro -%}
        {%- if reasoning_effort is not defined %}{% set reasoning_effort = "medium" %}{% endif %}
        {{- "<|start|>system<|message|>" ~ strftime_now("%Y-%m-%d") | length ~ reasoning_effort + "<|end|>" }}
        {%- for tool in tools or [] %}{% set tool = tool.function %}
            {{- "// " + tool.description + "\\ntype " + tool.name + " = (_: {\\n" }}
            {%- for name, schema in tool.parameters.properties.items() %}
                {{- name }}{{ "?" if name not in (tool.parameters.required or []) }}: {{ kind(schema) }}{{ "," if not loop.last }}
            {%- endfor %}}) => any;
        {%- endfor %}
        {%- set called = namespace(name=none) %}
        {%- for turn in messages -%}
            {%- if turn.role in ["developer", "system"] -%}<|start|>developer<|message|>{{ turn.content }}
            {%- elif turn.role == "assistant" -%}
                {%- if "<|message|>" in turn.content %}{{ raise_exception("a message within a message") }}{% endif %}
                {%- set later = messages[loop.index:] | selectattr("role", "equalto", "assistant") | list %}
                {%- if not later and turn.reasoning_content %}<|channel|>analysis<|message|>{{ turn.reasoning_content }}{% endif %}
                {%- for call in turn.tool_calls or [] %}
                    {{- " to=functions." + call.function.name + "<|message|>" }}{{ call.function.arguments | tojson }}
                    {%- set called.name = call.function.name %}
                {%- endfor %}
            {%- elif turn.role == "tool" -%}{{ "functions." + called.name + " to=assistant" + turn.content | tojson }}
            {%- else -%}{{ "<|start|>user<|message|>" + turn.content + "<|end|>" }}{% endif -%}
        {%- endfor -%}
        {%- if add_generation_prompt -%}
        <|start|>assistant
        {%- endif -%}""",
    "kimi k2": """
        {%- macro shown(turn) -%}
            {%- set content = turn.get("content") -%}
            {%- if content is string %}{{ content }}
            {%- elif content is not none %}{% for part in content %}{{ part.get("text", "?") }}{% endfor %}{% endif -%}
        {%- endmacro -%}
        {%- if tools -%}<|tools|>{{ tools | tojson(separators=(",", ":")) }}<|im_end|>{%- endif -%}
        {%- for turn in messages -%}
            {%- if loop.first and turn["role"] != "system" -%}<|im_system|>You help.<|im_end|>{%- endif -%}
            {{- {"user": "<|im_user|>", "assistant": "<|im_assistant|>"}.get(turn.role, "<|im_system|>") -}}
            {{- (turn.get("name") or turn["role"]) ~ "<|im_middle|>" -}}
            {%- if turn["role"] == "tool" -%}
                ## Result of {{ turn.tool_call_id }}{{ "\\n" }}
            {%- endif -%}
            {{- shown(turn) -}}
            {%- for call in turn.get("tool_calls") or [] -%}
                {%- set given = call["function"]["arguments"] -%}
                functions.{{ call["function"]["name"] }}:{{ loop.index0 }}{{ given if given is string else given | tojson }}
            {%- endfor -%}<|im_end|>
        {%- endfor -%}""",
}
