"""The commands of every program, with their settings, as the programs themselves parse them."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import docstring_parser
from cyclopts import App

from dynabench.cli.app import app
from dynabench.reference.setting import Setting
from serving.cli import commands, dynamo_run
from serving.worker.registry import ENGINES


@dataclass(frozen=True, slots=True)
class Command:
    """What can be typed: its words, what it does, and its settings by the groups of its help."""

    name: str
    paragraphs: tuple[str, ...]
    usage: str
    groups: dict[str, tuple[Setting, ...]]

    @property
    def page(self) -> str:
        """The page that describes it: one for each command of dynabench, and one for all programs of serving."""
        first, *rest = self.name.split()
        return rest[0] if first == "dynabench" else self.name if first == dynamo_run.NAME else "serving"


def all_commands() -> Iterator[Command]:
    """Yield the commands of every program, in the order of the help."""
    yield from _within(app, "dynabench")
    yield from _within(dynamo_run.app, dynamo_run.NAME)
    for name, program in programs().items():
        yield from _within(program, name)


def programs() -> dict[str, App]:
    """Return the processes of a deployment that can be started one by one, by their modules."""
    return {
        "serving.frontend": commands.frontend_app,
        "serving.router_service": commands.router_app,
        "serving.mocker": commands.mocker_app,
        "serving.echo": commands.echo_app,
        "serving.own": commands.own_app,
        **{f"serving.{entry.command}": commands.engine_app(name) for name, entry in ENGINES.items()},
        "serving.openai": commands.openai_app,
        "serving.kv_store": commands.store_app,
    }


def _within(program: App, name: str) -> Iterator[Command]:
    """Yield an app, if it does something, and the commands in it."""
    if program.default_command is not None:
        yield _command(program, name)
    for word in program:
        if not word.startswith("-"):
            yield from _within(program[word], f"{name} {word}")


def _command(program: App, name: str) -> Command:
    groups: dict[str, list[Setting]] = {}
    positional = ""
    for argument in program.assemble_argument_collection(parse_docstring=True):
        if argument.show:
            group: Any = argument.parameter.group
            setting = Setting.of(argument)
            groups.setdefault(group[0].name, []).append(setting)
            positional += f" {_typed(setting)}" if argument.index is not None else ""
    start = f"python -m {name}" if name in programs() else name
    usage = (program.usage or "").removeprefix("Usage: ") or f"{start} [OPTIONS]{positional}"
    is_command = name.startswith("dynabench ")
    about = _described(program) if is_command else [program.help]
    return Command(name, tuple(about), usage, {title: tuple(settings) for title, settings in groups.items()})


def _typed(argument: Setting) -> str:
    """Return an argument as a line of usage shows it."""
    name = argument.names[0].lstrip("-").upper() + "..." * argument.values.endswith("one or more")
    return name if argument.values.startswith("Required") else f"[{name}]"


def _described(program: App) -> list[str]:
    """Return the paragraphs of a command's docstring."""
    parsed = docstring_parser.parse(inspect.getdoc(program.default_command) or "")
    texts = (parsed.short_description, parsed.long_description)
    return [paragraph for text in texts for paragraph in (text or "").split("\n\n") if paragraph]
