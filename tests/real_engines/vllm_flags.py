"""Ask vLLM's own parser which arguments `vllm serve` takes: facts for the stand-in's table, without help texts.

    python -m tests.real_engines.vllm_flags > serving/stand_in/vllm/flags/command_line.json

Run it with the environment that `.ci/engines prepare` makes for vLLM. `test_vllm_flags.py` fails when the table is old.
"""

import argparse
import dataclasses
import json
from collections.abc import Callable
from enum import Enum
from typing import Any

SCALARS = {str: "text", int: "integer", float: "number", json.loads: "json", None: "text"}
NAMED = {
    "human_readable_int": "count",
    "human_readable_int_or_auto": "count_or_auto",
    "union_dict_and_str": "json_or_text",
}
KINDS = {
    "BooleanOptionalAction": "pair",
    "_StoreTrueAction": "switch",
    "_AppendAction": "repeated",
    "_HelpAction": "help",
}
LISTS = {"+": "list", "?": "value_or_none"}


def table() -> dict[str, Any]:
    """Return the version of vLLM, and its arguments in the order of its help."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.version import __version__

    parser = make_arg_parser(FlexibleArgumentParser())
    arguments = [
        _argument(action, group.title or "") for group in parser._action_groups for action in group._group_actions
    ]
    return {"version": __version__.partition("+")[0], "arguments": arguments}


def _argument(action: argparse.Action, group: str) -> dict[str, Any]:
    name = type(action).__name__
    kind = "positional" if not action.option_strings else KINDS.get(name) or LISTS.get(str(action.nargs), "value")
    found = {"dest": action.dest, "flags": action.option_strings, "group": group, "kind": kind}
    if kind not in ("pair", "switch", "help"):
        found |= _type(action.type, name)
    if action.choices:
        found["choices"] = [choice for choice in action.choices if choice is not None]
    default = _plain(action.default)
    if default is not None and default != argparse.SUPPRESS:
        found["default"] = default
    return found


def _type(convert: Callable[[str], Any] | None, action: str) -> dict[str, Any]:
    """Say what an argument's text is turned into, and whether it may be none."""
    if action == "LoRAParserAction":
        return {"type": "lora_modules"}
    name = getattr(convert, "__qualname__", "")
    if name.endswith(("_optional_type", "_parse_type")):
        (inner,) = [cell.cell_contents for cell in convert.__closure__ if callable(cell.cell_contents)]
        return _type(inner, action) | ({"is_optional": True} if "optional" in name else {})
    if name.endswith("parse_dataclass"):
        return {"type": "settings", "fields": _fields(convert.__defaults__[0])}
    if name.endswith("<lambda>"):
        return {"type": "name" if convert("Aa-A") == "aa_a" else "ids"}
    return {"type": NAMED.get(name) or SCALARS[convert]}


def _fields(kind: Any) -> dict[str, Any]:
    """Return a dataclass's fields, with the defaults that are plain."""
    return {field.name: _default_of(field) for field in dataclasses.fields(kind) if field.init}


def _default_of(field: Any) -> Any:
    default = field.default
    if hasattr(default, "default_factory"):  # pydantic's
        default = default.default if default.default_factory is None else None
    return None if default is dataclasses.MISSING else _plain(default)


def _plain(value: Any) -> Any:
    """Return a default as JSON, None if it is none or not plain."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, set | frozenset | tuple):
        return sorted(value)
    return value if isinstance(value, bool | int | float | str | list | dict) else None


def text(found: dict[str, Any]) -> str:
    """Write the table, one argument a line."""
    lines = ",\n".join(json.dumps(each) for each in found["arguments"])
    return f'{{"version": {json.dumps(found["version"])}, "arguments": [\n{lines}\n]}}\n'


if __name__ == "__main__":
    print(text(table()), end="")
