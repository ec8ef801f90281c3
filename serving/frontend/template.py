"""Chat templates: from the model's files only, rendered in a sandbox."""

import datetime
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.model_card import ModelError, ModelFiles

MAX_PROMPT_CHARACTERS = 16 << 20
PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""What is used where a model has no template."""


class TemplateError(ValueError):
    """Messages that the model's template refuses."""


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, files: ModelFiles) -> None:
        """Compile it.

        Raises:
            ModelError: it is no template.
        """
        config = files.json("tokenizer_config.json")
        source: Any = files.contents.get("chat_template.jinja", b"").decode(errors="replace")
        source = source or files.json("chat_template.json").get("chat_template") or config.get("chat_template") or PLAIN
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default", PLAIN)
        tokens = {name: config.get(name) for name in ("bos_token", "eos_token", "pad_token", "unk_token")}
        self._tokens = {
            name: token["content"] if isinstance(token, dict) else token for name, token in tokens.items() if token
        }
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
        """Return the prompt of a conversation.

        Raises:
            TemplateError: the template refuses it, or fails on it.
        """
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=True, **self._tokens
            ):
                size += len(piece)
                if size > MAX_PROMPT_CHARACTERS:
                    raise TemplateError(f"the prompt is longer than {MAX_PROMPT_CHARACTERS} characters")
                pieces.append(piece)
        except (jinja2.TemplateError, TypeError, KeyError, AttributeError, OverflowError, MemoryError) as error:
            raise TemplateError(f"the model's chat template refuses these messages: {error}") from error
        return "".join(pieces)


def _tojson(value: Any, indent: int | None = None) -> str:
    import json

    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
