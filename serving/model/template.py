"""Chat templates: from the model's files only, rendered in a sandbox."""

import contextlib
import datetime
import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import jinja2
import jinja2.ext
import jinja2.parser
import msgspec
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.model.errors import ModelError
from serving.model.files import ModelFiles
from serving.runtime.world import world

MAX_PROMPT_CHARACTERS = 16 << 20
PLAIN = (
    "{% for tool in tools or [] %}<|tool|>{{ tool | tojson }}\n{% endfor %}"
    "{% for document in documents or [] %}<|document|>{{ document | tojson }}\n{% endfor %}"
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['reasoning_content'] %}<|think|>{{ message['reasoning_content'] }}<|answer|>{% endif %}"
    "{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<|call|>{{ call | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The template for a model that has none: it leaves nothing out, as tools are most of an agent's prompt."""
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of a model's templates: the second, if there is one, is for conversations with tools."""
RESERVED = frozenset(["messages", "tools", "documents", "add_generation_prompt"])
"""Variables of templates that a request sets by fields of its own."""


class TemplateError(ValueError):
    """The model's template refuses the messages."""


def source(files: ModelFiles) -> str:
    """Return a model's chat template, `PLAIN` if it has none."""
    return sources(files).get(DEFAULT, PLAIN)


def sources(files: ModelFiles) -> dict[str, str]:
    """Return a model's chat templates by name."""
    found: Any = files.contents.get("chat_template.jinja", b"").decode(errors="replace")
    found = found or files.json("chat_template.json").get("chat_template")
    found = found or files.json("tokenizer_config.json").get("chat_template") or PLAIN
    named = {entry["name"]: entry["template"] for entry in found} if isinstance(found, list) else {DEFAULT: str(found)}
    if with_tools := files.contents.get(f"additional_chat_templates/{WITH_TOOLS}.jinja"):
        named[WITH_TOOLS] = with_tools.decode(errors="replace")
    return {name: named[name] for name in (DEFAULT, WITH_TOOLS) if name in named}


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what a model was trained to say; it changes no text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class ChatTemplate:
    """A model's chat templates."""

    def __init__(self, files: ModelFiles) -> None:
        """Compile them.

        Raises:
            ModelError: one is not a valid template.
        """
        config = files.json("tokenizer_config.json")
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        self._environment = environment
        try:
            self._templates = {name: _Compiled.of(text, environment) for name, text in sources(files).items()}
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        documents: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        variables: Mapping[str, Any] | None = None,
        template: str = "",
    ) -> str:
        """Return the prompt of a conversation, with the start of the answer's turn if wanted.

        Args:
            messages: as transformers takes them; a content of several texts is joined if the template wants one text.
            tools: what the model may call.
            documents: what the model may quote.
            add_generation_prompt: whether the start of the answer's turn is wanted.
            variables: further ones, as a request's `chat_template_kwargs` has them.
            template: a template to use instead of the model's.

        Raises:
            TemplateError: the template refuses it, or fails on it.
        """
        compiled = self._chosen(template, has_tools=tools is not None)
        if not compiled.knows_developers:
            messages = _as_system(messages)
        messages = [_prepared(message, compiled) for message in messages]
        given = {"tools": tools, "documents": documents, "add_generation_prompt": add_generation_prompt}
        pieces, size = [], 0
        try:
            for piece in compiled.jinja.generate(
                **{**self._tokens, **(variables or {}), **given, "messages": messages}
            ):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise TemplateError(f"the prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
                pieces.append(piece)
            prompt = "".join(pieces)
            prompt.encode()  # half a surrogate pair is not text
        except jinja2.TemplateError as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        except Exception as error:  # a template is somebody else's program: it may raise anything
            raise TemplateError(
                f"the model's chat template fails on these messages: {type(error).__name__}: {_shown(error)}"
            ) from error
        return prompt

    def _chosen(self, own: str, *, has_tools: bool) -> "_Compiled":
        """Return the template for a request, which may bring its own.

        Raises:
            TemplateError: its own is not valid.
        """
        if not own:
            return self._templates.get(WITH_TOOLS if has_tools else DEFAULT) or self._templates[DEFAULT]
        try:
            return _Compiled.of(own, self._environment)
        except (jinja2.TemplateError, RecursionError) as error:
            raise TemplateError(f"the request's chat template is not valid: {error}") from error


class _Compiled(NamedTuple):
    """A template."""

    jinja: jinja2.Template
    takes_parts: bool
    """Whether it walks through the parts of a message's content, instead of taking one text."""
    knows_developers: bool
    """Whether it has a place for messages of developers, as far as its text shows."""

    @classmethod
    def of(cls, text: str, environment: jinja2.Environment) -> "_Compiled":
        """Compile it."""
        loops = environment.parse(text).find_all(nodes.For)
        takes_parts = any(map(_is_content, (loop.iter for loop in loops)))
        return cls(environment.from_string(text), takes_parts, "'developer'" in text or '"developer"' in text)


def _as_system(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with those of developers as one of the system, which comes first, as in vLLM."""
    if all(message["role"] != "developer" for message in messages):
        return messages
    is_system = [message["role"] in ("developer", "system") for message in messages]
    others = [message for message, is_first in zip(messages, is_system, strict=True) if not is_first]
    texts = [_text_of(message) for message, is_first in zip(messages, is_system, strict=True) if is_first]
    return [{"role": "system", "content": "\n\n".join(filter(None, texts))}, *others]


def _text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def _prepared(message: dict[str, Any], template: _Compiled) -> dict[str, Any]:
    """Return a message as templates expect it: arguments of tool calls are objects; content is one text unless walked."""
    content, calls = message.get("content"), message.get("tool_calls")
    if isinstance(content, list) and not template.takes_parts:
        message = message | {"content": "\n".join(part["text"] for part in content)}  # by lines, as in vLLM
    return message | {"tool_calls": [_with_object(call) for call in calls]} if calls else message


def _with_object(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, an empty one if a model's text was none."""
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            arguments = msgspec.json.decode(arguments)
    return call | {"function": function | {"arguments": arguments if isinstance(arguments, dict) else {}}}


def _is_content(walked: nodes.Node) -> bool:
    """Return whether a loop walks through a message's content, as far as its name says."""
    while isinstance(walked, nodes.Filter) and walked.node is not None:
        walked = walked.node
    if isinstance(walked, nodes.Getitem):
        return isinstance(walked.arg, nodes.Const) and walked.arg.value == "content"
    if isinstance(walked, nodes.Getattr):
        return walked.attr == "content"
    return isinstance(walked, nodes.Name) and walked.name == "content"


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _shown(error: Exception) -> str:
    """Return an error's message, shortened and without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(error))[:300]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    now = datetime.datetime.fromtimestamp(world().wall_s(), tz=datetime.UTC)
    return now.astimezone().strftime(form)  # local time, as in transformers
