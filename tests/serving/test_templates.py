"""Chat templates are rendered as transformers and vLLM do."""

import copy
import json

import msgspec
import pytest

from serving.frontend.api.errors import ApiError
from serving.frontend.api.kinds import parse_request
from serving.frontend.api.openai import ChatRequest
from serving.model.files import ModelFiles
from serving.model.template import PLAIN, ChatTemplate
from tests.support.templates import AGENT, CONVERSATIONS, PARTS, PROMPTS, SPECIAL_TOKENS, TEMPLATES, TOOL, USER

TOKENS = {"tokenizer_config.json": msgspec.json.encode(SPECIAL_TOKENS)}


def made(source, **more):
    return ChatTemplate(ModelFiles({"chat_template.jinja": source.encode(), **more}))


def with_text_arguments(messages):
    """Return messages as clients send them: the arguments of a call are a text of JSON."""
    messages = copy.deepcopy(messages)
    for message in messages:
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return messages


@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_a_prompt_is_the_one_that_transformers_rendered(name, conversation):
    messages, tools, variables = CONVERSATIONS[conversation]
    template = made(TEMPLATES[name], **TOKENS)
    assert template.render(messages, tools, variables=variables) == PROMPTS[name][conversation]


@pytest.mark.parametrize("name", TEMPLATES)
def test_arguments_of_tool_calls_are_objects_however_they_are_sent(name):
    template = made(TEMPLATES[name], **TOKENS)
    sent = template.render(with_text_arguments(AGENT), [TOOL])
    assert sent == template.render(AGENT, [TOOL])
    if "arguments" in TEMPLATES[name]:
        assert "Zürich" in sent
        assert "\\u" not in sent


@pytest.mark.parametrize("arguments", ["", "nonsense", "[1]", None, "1"])
def test_arguments_that_are_no_object_are_an_empty_one(arguments):
    call = {"function": {"name": "f", "arguments": arguments}}
    template = made("{% for call in messages[0].tool_calls %}{{ call.function.arguments | tojson }}{% endfor %}")
    assert template.render([{"role": "assistant", "content": "", "tool_calls": [call]}], None) == "{}"


def test_json_is_written_as_a_template_asks():
    rendered = made(TEMPLATES["json of all kinds"]).render([USER], [TOOL])
    assert rendered.startswith(json.dumps([TOOL], ensure_ascii=False, separators=(",", ":")))
    assert json.dumps([TOOL], ensure_ascii=False, indent=2) in rendered
    assert rendered.endswith(json.dumps([TOOL], sort_keys=True) + "1")


def test_what_is_marked_as_generated_is_a_scope_of_its_own():
    assert made(TEMPLATES["generation"]).render([{"role": "assistant", "content": "yes"}], None) == "yesouter\n"


def test_content_is_one_text_unless_the_template_walks_through_its_parts():
    assert made("{% for message in messages %}{{ message.content }}{% endfor %}").render(PARTS, None) == "one\ntwo"
    assert made(TEMPLATES["parts"]).render(PARTS, None) == "[one][two]"
    walked = "{% for part in messages[0]['content'] | list %}{{ part.text }};{% endfor %}"
    assert made(walked).render(PARTS, None) == "one;two;"


def test_a_conversation_with_tools_takes_the_template_for_tools():
    both = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "tools"}]
    listed = ChatTemplate(ModelFiles({"tokenizer_config.json": msgspec.json.encode({"chat_template": both})}))
    beside = made("plain", **{"additional_chat_templates/tool_use.jinja": b"tools"})
    for template in (listed, beside):
        assert template.render([USER], None) == "plain"
        assert template.render([USER], [TOOL]) == "tools"


def test_the_built_in_template_leaves_nothing_out():
    rendered = ChatTemplate(ModelFiles({})).render(AGENT, [TOOL], documents=[{"title": "Book"}])
    for text in (TOOL["function"]["description"], "A tool knows.", "Zürich", "rain", "Book"):
        assert text in rendered
    assert ChatTemplate(ModelFiles({})).render([USER], None) == f"<|user|>{USER['content']}\n<|assistant|>"
    assert "tool" in PLAIN


def asked(**fields):
    return parse_request(json.dumps({"model": "m", "messages": [USER], **fields}).encode(), ChatRequest)


def test_variables_of_a_request_reach_the_template():
    request = asked(reasoning_effort="none", chat_template_kwargs={"extra": 1})
    assert request.template_variables == {"reasoning_effort": "none", "enable_thinking": False, "extra": 1}
    assert asked(reasoning_effort="low", chat_template_kwargs={"enable_thinking": False}).template_variables == {
        "reasoning_effort": "low",
        "enable_thinking": False,
    }
    with pytest.raises(ApiError, match="must not have messages"):
        asked(chat_template_kwargs={"messages": []})


def test_reasoning_of_earlier_turns_has_both_names():
    for name in ("reasoning", "reasoning_content"):
        [message] = asked(messages=[{"role": "assistant", "content": "x", name: "because"}]).messages
        assert message.for_template()["reasoning_content"] == message.for_template()["reasoning"] == "because"
