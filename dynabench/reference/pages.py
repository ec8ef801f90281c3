"""The pages of the reference, by their file names.

They are our own, because cyclopts' `generate_docs` skips commands that are not loaded, repeats shared settings on the page of
each command (304 lines for `simulate`, where these have 74), and names types where these name ranges and units.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence

from dynabench.cli.app import COMMANDS
from dynabench.reference import deployment_file, requests, vllm_flags
from dynabench.reference.command import Command, all_commands
from dynabench.reference.environment import OTHERS
from dynabench.reference.setting import Setting, item, paragraph, prose
from foundation.exit_codes import EXIT_CODES
from serving.cli.help import OWN

COMMAND = "python -m dynabench.reference docs/reference"
"""What writes the pages again."""

NOTE = f"\n<!-- Written by {COMMAND}. Do not edit. -->\n"

FAILS = "Exit code 1: "
"""How the paragraph of a command begins that says when it exits with 1."""

INDEX = """\
# Reference

Every command, flag, setting, default, unit, environment variable and exit code. These pages are generated from
the same definitions as the command lines, so `--help-all` of a command says the same.
"""


def pages() -> dict[str, str]:
    """Return each page in Markdown, by the name of its file."""
    commands = list(all_commands())
    shared = _shared(commands)
    by_page: dict[str, list[Command]] = defaultdict(list)
    for command in commands:
        by_page[command.page].append(command)
    made = {
        "index": "\n".join(_index(by_page)),
        **{name: "\n".join(_of_commands(name, members, shared)) for name, members in by_page.items()},
        "settings": "\n".join(_settings(commands, shared)),
        "deployment-file": deployment_file.page(),
        "environment": "\n".join(_environment(commands)),
        "requests": requests.page(),
        "vllm-flags": vllm_flags.page(),
    }
    return {f"{name}.md": f"{text.strip()}\n{NOTE}" for name, text in made.items()}


def _shared(commands: Sequence[Command]) -> dict[str, list[Command]]:
    """Return the groups of settings that several commands have, with those commands."""
    found: dict[str, list[Command]] = defaultdict(list)
    for command in commands:
        for title in command.groups.keys() - set(OWN):
            found[title].append(command)
    order = [title for command in commands for title in command.groups]
    several = [title for title, having in found.items() if len(having) > 1]
    return {title: found[title] for title in sorted(several, key=order.index)}


def _index(by_page: dict[str, list[Command]]) -> Iterator[str]:
    yield INDEX
    yield "## Commands\n"
    for name, text in COMMANDS.items():
        yield item(f"[dynabench {name}]({name}.md): {prose(text[1])}")
    yield item("[dynamo-run](dynamo-run.md): Serve a model, or talk to it: any way in, any engine.")
    for command in by_page["serving"]:
        yield item(f"[python -m {command.name}](serving.md#{_anchor(command.name)}): {prose(command.paragraphs[0])}")
    yield "\n## Settings\n"
    yield item(
        "[Settings of several commands](settings.md): workload, load, workers, engine, router, planner, network."
    )
    yield item("[The deployment file](deployment-file.md): every key of the YAML file that `--deployment` reads.")
    yield item("[Environment variables](environment.md).")
    yield item("[The Python API](../python-api.md): functions and results of `import dynabench`.")
    yield item("[Endpoints and fields](requests.md) of the frontend, beside those of other servers.")
    yield item("[Flags of vllm serve](vllm-flags.md), and what `dynabench vllm` does with each.")
    yield "\n## Exit codes\n"
    yield from (item(f"**{code}**: {prose(text)}.") for code, text in EXIT_CODES.items())
    yield "\nWhen it is 1:\n"
    for command in (command for name in COMMANDS for command in by_page[name]):
        for part in command.paragraphs:
            if part.startswith(FAILS):
                yield item(f"[{command.name}]({command.page}.md): {prose(part.removeprefix(FAILS))}")
    yield "\nResults are written, and whole, before the exit code is returned. An interrupted command passes no gate."
    yield "\nAn error prints one line that says what is wrong. A traceback is a bug; its exit code is 1."
    yield "\n## On every command\n"
    yield paragraph(
        "`--help` of a command prints the options that people use, and `--help-all` all of them. `dynabench --version` "
        "and `dynamo-run --version` print the version."
    )


def _of_commands(name: str, commands: Sequence[Command], shared: dict[str, list[Command]]) -> Iterator[str]:
    """Yield a page about a command, or about those with one first word."""
    is_alone = len(commands) == 1
    if not is_alone:
        yield "# Programs of a deployment\n" if name == "serving" else f"# dynabench {name}\n"
        yield from (item(f"[{each.name}](#{_anchor(each.name)}): {prose(each.paragraphs[0])}") for each in commands)
        yield ""
    for command in commands:
        yield f"{'#' if is_alone else '##'} {command.name}\n"
        yield from (f"{paragraph(prose(text))}\n" for text in command.paragraphs)
        yield "\n".join(f"    {line}".rstrip() for line in command.usage.strip().splitlines()) + "\n"
        yield from _groups(command, shared)


def _groups(command: Command, shared: dict[str, list[Command]]) -> Iterator[str]:
    own = {title: settings for title, settings in command.groups.items() if title not in shared}
    for title, settings in own.items():
        yield f"**{'Options' if title == 'Parameters' else title}**\n"
        yield from (setting.line() for setting in settings)
        yield ""
    others = [title for title in shared if title in command.groups]
    if others:
        yield f"**{'Further options' if own else 'Options'}**, described in [settings of several commands](settings.md)\n"
        for title in others:
            names = ", ".join(f"`{setting.names[0]}`" for setting in command.groups[title])
            yield item(f"[{title}](settings.md#{_anchor(title)}): {names}")
        yield ""


def _settings(commands: Sequence[Command], shared: dict[str, list[Command]]) -> Iterator[str]:
    yield "# Settings of several commands\n"
    yield paragraph(
        "Flags by the groups of the help. The page of each command lists which of them it has. Where commands differ in a "
        "flag, it is listed once for each variant."
    )
    for title, having in shared.items():
        yield f"\n## {title}\n"
        yield paragraph(f"Of {_names(having)}.") + "\n"
        variants: dict[Setting, list[Command]] = defaultdict(list)
        for command in having:
            for setting in command.groups[title]:
                variants[setting].append(command)
        known = [setting.names for setting in variants]
        for setting in sorted(variants, key=lambda setting: known.index(setting.names)):
            is_one_of_several = known.count(setting.names) > 1
            yield setting.line(f" Of {_names(variants[setting])}." if is_one_of_several else "")


def _environment(commands: Sequence[Command]) -> Iterator[str]:
    yield "# Environment variables\n"
    yield "A flag takes precedence over its variable.\n"
    lines = {name: item(f"**`{name}`**: {text}") for name, text in OTHERS.items()}
    for command in commands:
        for setting in (setting for group in command.groups.values() for setting in group):
            if name := setting.environment:
                lines[name] = item(f"**`{name}`**: The same as `{setting.names[0]}`. {setting.about}")
    yield from (lines[name] for name in sorted(lines))


def _names(commands: Sequence[Command]) -> str:
    return ", ".join(f"`{command.name}`" for command in commands)


def _anchor(heading: str) -> str:
    """Return the anchor that GitHub and MkDocs give a heading."""
    return "".join(char for char in heading.lower().replace(" ", "-") if char.isalnum() or char in "-_")
