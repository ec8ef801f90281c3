"""Chat templates: from the model's files only, rendered in a sandbox."""

import datetime
import json
import re
from typing import Any

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serving.model.errors import ModelError
from serving.model.files import ModelFiles

MAX_PROMPT_CHARACTERS = 16 << 20
PLAIN = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""The template for a model that has none."""


class TemplateError(ValueError):
    """The model's template refuses the messages."""


def source(files: ModelFiles) -> str:
    """Return a model's chat template, `PLAIN` if it has none."""
    found: Any = files.contents.get("chat_template.jinja", b"").decode(errors="replace")
    found = found or files.json("chat_template.json").get("chat_template")
    found = found or files.json("tokenizer_config.json").get("chat_template") or PLAIN
    if isinstance(found, list):  # several, by name
        found = {entry["name"]: entry["template"] for entry in found}.get("default", PLAIN)
    return str(found)


class ChatTemplate:
    """A model's chat template."""

    def __init__(self, files: ModelFiles) -> None:
        """Compile it.

        Raises:
            ModelError: it is not a valid template.
        """
        config = files.json("tokenizer_config.json")
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
            self._template = environment.from_string(source(files))
        except jinja2.TemplateSyntaxError as error:
            raise ModelError(f"the model's chat template is not valid: line {error.lineno}: {error.message}") from error
        except (jinja2.TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template is not valid: {error}") from error

    def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, *, add_generation_prompt: bool = True
    ) -> str:
        """Return the prompt of a conversation, with the start of the answer's turn if wanted.

        Raises:
            TemplateError: the template refuses it, or fails on it.
        """
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=messages, tools=tools, add_generation_prompt=add_generation_prompt, **self._tokens
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


def _tojson(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _shown(error: Exception) -> str:
    """Return an error's message, shortened and without memory addresses."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(error))[:300]


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now(tz=datetime.UTC).strftime(form)
