"""Which architecture a config.json describes, and in which part of it."""

import difflib
import functools
import re
from collections.abc import Iterator, Mapping
from typing import Any

from foundation.text import printable
from mocker.models.architectures import ARCHITECTURES, OTHER_NAMES

TEXT = ("text_config", "llm_config", "llm_cfg", "language_config", "thinker_config", "language_model")
"""Parts of multimodal models that describe the language model."""
CLASS_ENDS = re.compile(
    r"(Text)?(ForCausalLM(V2)?|ForConditionalGeneration|LMHeadModel|HeadModel|ForRewardModel|Model|ChatModel)$"
)


def text_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the part that describes the language model."""
    *_, text = parts_of(config)
    return text


def parts_of(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the file, and the parts in it that describe the language model, each in the one before it."""
    yield config
    text = next((config[name] for name in TEXT if isinstance(config.get(name), dict) and config[name]), None)
    if text is not None:
        yield from parts_of(text)


def architecture_of(config: Mapping[str, Any], text: Mapping[str, Any]) -> str:
    """Return what a file calls its language model: its `model_type`, else its class, else what the whole file is called.

    Raises:
        ValueError: it is not known.
    """
    if not text.get("model_type") and (of_class := _of_class(text)) is not None:
        return of_class
    given = text.get("model_type") or config.get("model_type")
    if not given:
        raise ValueError("it has no model_type, so its layers are unknown; --read-model-as llama reads it as a Llama")
    name = given if isinstance(given, str) else repr(given)
    for known in (name, name.removesuffix("_text"), OTHER_NAMES.get(name), name.lower()):
        if known in ARCHITECTURES:
            return str(known)
    raise ValueError(f"architecture {printable(name)[:60]} is not known; {instead_of(name)}")


def _of_class(text: Mapping[str, Any]) -> str | None:
    classes = text.get("architectures")
    names = [_plain(CLASS_ENDS.sub("", str(name))) for name in classes] if isinstance(classes, list) else []
    return next((_by_class()[name] for name in names if name in _by_class()), None)


def instead_of(name: str) -> str:
    """Say how to go on where an architecture is not known."""
    close = difflib.get_close_matches(name, ARCHITECTURES, n=1, cutoff=0.6)
    other = close[0] if close else "llama"
    return f"if its layers match a known architecture's, such as {other}, set --read-model-as {other}"


@functools.cache
def _by_class() -> dict[str, str]:
    return {_plain(name): name for name in reversed(ARCHITECTURES)}


def _plain(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name.lower())
