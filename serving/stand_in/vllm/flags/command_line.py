"""The command line of `vllm serve`, read as vLLM 0.32 reads it, without vLLM."""

import argparse
import difflib
import functools
import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from serving.stand_in.vllm.flags.arguments import Argument, arguments, version
from serving.stand_in.vllm.flags.values import value_of
from serving.stand_in.vllm.flags.words import plain_words

log = logging.getLogger(__name__)

IDLE = ("--disable-log-requests",)
"""Flags of older versions that ask for what is so anyhow; scripts everywhere still have them."""

FORMER = {
    "--disable-frontend-multiprocessing": "leave it out",
    "--enable-reasoning": "--reasoning-parser is enough",
    "--guided-decoding-backend": "use --structured-outputs-config.backend",
    "--max-seq-len-to-capture": "use --max-cudagraph-capture-size",
    "--cuda-graph-sizes": "use --cudagraph-capture-sizes",
    "--num-scheduler-steps": "leave it out",
    "--rope-scaling": "use --hf-overrides",
    "--rope-theta": "use --hf-overrides",
    "--swap-space": "use --kv-offloading-size for KV in host memory",
    "--task": "use --runner and --convert",
    "--use-v2-block-manager": "leave it out",
}
"""Flags of older versions, and what to do instead."""

SETTING = re.compile(r"(?<![\w/.'\"-])[a-z0-9]+(?:_[a-z0-9]+)+(?![\w/'\"-])")
"""A name with underscores that stands by itself."""


def parse_arguments(words: Sequence[str], *, beside: Sequence[str] = ()) -> dict[str, Any]:
    """Return the arguments that are given, by their names in vLLM.

    Args:
        words: the words after `vllm serve`.
        beside: other flags, which an unknown one may be meant to be.

    Raises:
        ValueError: one is unknown, or its value is not what it takes; the message is one line.
    """
    if words and words[0] == "serve":
        raise ValueError("serve: leave it out; dynabench vllm takes the model first, as in dynabench vllm MODEL")
    plain = plain_words(list(words))
    if ours := [word for word in plain if word in beside]:  # on the command line, it would have been read before us
        raise ValueError(
            f"{ours[0]} in the file of --config: this flag is dynabench's own; it goes on the command line"
        )
    try:
        parsed, unknown = _parser().parse_known_args(plain)
    except _PlainError as error:
        raise ValueError(str(error)) from None
    except argparse.ArgumentError as error:
        name = _known(error.argument_name)
        raise ValueError(f"{name}: {error.message}" if name else str(error.message)) from None
    for word in [word for word in unknown if word.replace("_", "-") in IDLE]:
        log.info("accepted without effect: %s, which vllm serve %s has no more", word, version())
        unknown.remove(word)
    if unknown:
        raise ValueError(_unknown(unknown[0], beside))
    given = vars(parsed)
    _take_model(given, words)
    return given


def differing(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments whose values are not vLLM's defaults."""
    return {name: value for name, value in given.items() if not _is_default(arguments()[name], value)}


def in_flags(message: str) -> str:
    """Return a message about settings with the flags of those that are arguments of vLLM, too."""
    return SETTING.sub(lambda found: arguments()[found[0]].flag if found[0] in arguments() else found[0], message)


def _is_default(argument: Argument, value: Any) -> bool:
    if argument.type == "settings":
        left = {key for key, entry in (value or {}).items() if entry != argument.fields[key]}
        return not left
    return bool(value == argument.default)


def _take_model(given: dict[str, Any], words: Sequence[str]) -> None:
    """Turn both places of the model into one.

    Raises:
        ValueError: both name one, or the model is not the first word although vLLM needs it there.
    """
    model = given.pop("model_tag", None)
    if model is None:
        if "served_model_name" in given and "model" not in given:
            raise ValueError(
                f"--served-model-name {' '.join(given['served_model_name'])}: expected the model as the first word, too"
            )
        return
    if "model" in given:
        raise ValueError(f"--model {given['model']}: expected one model, and {model} is there, too")
    given["model"] = model


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


@functools.cache
def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="dynabench vllm", usage="", add_help=False, exit_on_error=False, argument_default=argparse.SUPPRESS
    )
    for argument in arguments().values():
        _add(parser, argument)
    return parser


def _add(parser: argparse.ArgumentParser, argument: Argument) -> None:
    if argument.kind == "positional":
        parser.add_argument(argument.dest, nargs="?")
        return
    options: dict[str, Any] = {"dest": argument.dest}
    match argument.kind:
        case "switch":
            parser.add_argument(*argument.flags, action="store_true", **options)
            return
        case "pair":
            yes = [flag for flag in argument.flags if not flag.startswith("--no-")]
            parser.add_argument(*yes, action=argparse.BooleanOptionalAction, **options)
            return
        case "list":
            options["nargs"] = "+"
        case "value_or_none":
            options |= {"nargs": "?", "const": True}
        case "repeated":
            options["action"] = "append"
    parser.add_argument(*argument.flags, type=functools.partial(_converted, argument), **options)


def _converted(argument: Argument, text: str) -> Any:
    try:
        return value_of(argument, text)
    except ValueError as error:
        raise _PlainError(str(error)) from None


class _PlainError(Exception):
    """Passes through argparse, which would wrap a ValueError in words of its own."""


def _known(name: str | None) -> str:
    """Return the spelling of an argument that messages use, from argparse's list of all."""
    return next((part for part in (name or "").split("/") if part.startswith("--")), name or "")


def _unknown(word: str, beside: Sequence[str]) -> str:
    if not word.startswith("-"):
        return f"{word}: there is no place for this; vllm serve takes one model, and flags"
    flag = word.partition("=")[0].partition(".")[0]
    if flag in FORMER:
        return f"{flag}: vllm serve {version()} has it no more; {FORMER[flag]}"
    flags = [each for argument in arguments().values() for each in argument.flags]
    close = difflib.get_close_matches(flag, [*beside, *flags], n=2, cutoff=0.7)
    guess = f"did you mean {' or '.join(close)}?" if close else "dynabench vllm --help=WORD searches them"
    return f"{flag}: unknown to vllm serve {version()}; {guess}"
