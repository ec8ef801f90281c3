"""The words of a command line in the one form that argparse reads, out of all those that `vllm serve` takes.

--max_model_len 8k                        --max-model-len 8k
-O3                                       --optimization-level 3
--kv-transfer-config.kv_role kv_both      --kv-transfer-config '{"kv_role": "kv_both"}'
--config FILE.yaml                        what the file says, before all other words, which win
"""

import json
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from serving.stand_in.vllm.flags.values import count

log = logging.getLogger(__name__)

CONFIG = "--config"
DOTTED = re.compile(r"(-[A-Za-z-][\w-]*)\.([^=]+)")
LEVELS = ("0", "1", "2", "3")


def plain_words(words: list[str]) -> list[str]:
    """Return the words in the form that argparse reads.

    Raises:
        ValueError: the file of --config cannot be read, or a dotted flag has no value.
    """
    return _undotted([_hyphenated(word) for word in _levelled(_with_file(words))])


def _with_file(words: list[str]) -> list[str]:
    """Put what a file says after the model, and so before the flags, of which the last counts."""
    for word in words:
        if word.startswith(f"{CONFIG}="):
            raise ValueError(f"{word}: expected {CONFIG} FILE as two words; vllm serve ignores the file otherwise")
    if CONFIG not in words:
        return words
    place = words.index(CONFIG)
    rest = words[:place] + words[place + 2 :]
    if CONFIG in rest:
        raise ValueError(f"{CONFIG} is there twice: expected one file")
    if place + 1 == len(words):
        raise ValueError(f"{CONFIG}: expected a YAML file after it")
    said = list(_words_of(_read(Path(words[place + 1]))))
    num_before = 0 if not rest or rest[0].startswith("-") else 1
    if not num_before and "--model" not in said:
        raise ValueError(f"{CONFIG} {words[place + 1]}: expected a model in the file, or as the first word")
    if num_before:
        said = _without_model(said)
    return rest[:num_before] + said + rest[num_before:]


def _without_model(said: list[str]) -> list[str]:
    """Leave out a file's model, because the command line's counts."""
    if "--model" not in said:
        return said
    place = said.index("--model")
    return said[:place] + said[place + 2 :]


def _read(path: Path) -> Mapping[str, Any]:
    if path.suffix not in (".yaml", ".yml"):
        raise ValueError(f"{CONFIG} {path}: expected a file that ends in .yaml or .yml")
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"{CONFIG} {path}: expected a YAML file ({error})") from None
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        raise ValueError(f"{CONFIG} {path}: expected flags by their names, such as port: 8000")
    return found


def _words_of(settings: Mapping[str, Any]) -> Iterator[str]:
    """Yield a file's settings as flags. False is dropped, as in vLLM, even where there is a --no-FLAG."""
    for key, value in settings.items():
        match value:
            case True:
                yield f"--{key}"
            case False:
                log.warning("%s: false in the file of %s is ignored, as by vllm serve; use --no-%s", key, CONFIG, key)
            case list():
                if value:
                    yield f"--{key}"
                    yield from map(str, value)
            case dict():
                yield from (f"--{key}", json.dumps(value))
            case _:
                yield from (f"--{key}", str(value))


def _levelled(words: list[str]) -> Iterator[str]:
    """Spell out -O3, -O=3 and -O 3."""
    for word, after in zip(words, [*words[1:], ""], strict=False):  # the last word has none after it
        if word == "-O" and after in LEVELS:
            yield "--optimization-level"
        elif word.startswith("-O") and word != "-O":
            yield from ("--optimization-level", word[2:].removeprefix("="))
        else:
            yield word


def _hyphenated(word: str) -> str:
    """Replace underscores in the name of a flag, up to its first dot."""
    if not word.startswith("--"):
        return word
    name, equals, value = word.partition("=")
    head, dot, tail = name.partition(".")
    return head.replace("_", "-") + dot + tail + equals + value


def _undotted(words: list[str]) -> list[str]:
    """Gather the entries of each dotted flag in one JSON object, which follows the other words, and so replaces theirs."""
    others: list[str] = []
    gathered: dict[str, dict[str, Any]] = {}
    left = iter(words)
    for word in left:
        name, equals, value = word.partition("=")
        dotted = DOTTED.fullmatch(name)
        if dotted is None:
            others.append(word)
            continue
        if not equals:
            found = next(left, None)
            if found is None:
                raise ValueError(f"{name}: expected a value")
            value = found
        _put(gathered.setdefault(dotted[1], {}), dotted[2], value)
    return others + [word for flag, entries in gathered.items() for word in (flag, json.dumps(entries))]


def _put(entries: dict[str, Any], path: str, text: str) -> None:
    """Set an entry at a dotted path; a path that ends with + adds words, separated by commas, to a list."""
    nested: Any = text.split(",") if path.endswith("+") else _entry(text)
    for key in reversed(path.removesuffix("+").split(".")):
        nested = {key: nested}
    _merge(entries, nested)


def _merge(there: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        old = there.get(key)
        if isinstance(value, dict) and isinstance(old, dict):
            _merge(old, value)
        elif isinstance(value, list) and isinstance(old, list):
            old += value
        else:
            there[key] = value


def _entry(text: str) -> Any:
    """Read JSON, or a number with a suffix, or else text."""
    for read in (json.loads, count):
        try:
            return read(text)
        except ValueError:
            continue
    return text
