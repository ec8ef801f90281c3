"""The command line: commands are loaded when needed, and bad input gives one line."""

import difflib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any, NoReturn

from cyclopts import App, CycloptsError, UnknownOptionError

from dynabench.cli.questions import QUESTIONS
from dynabench.elsewhere import answer
from dynabench.interrupt import ASKING
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.exit_codes import EXIT_CODES, INTERRUPTED, UNREAD, USAGE_ERROR
from foundation.namesake import refuse_namesake
from foundation.text import printable, shortened
from serving.cli.command_line import PLAIN_DEFAULTS, begin, reason, version
from serving.cli.help import HELP_ALL, HELP_FLAGS, CommandLine

COMMANDS = {
    "simulate": ("experiment:simulate", "Compare router modes, or any other settings, in virtual time."),
    "run": ("experiment:run", "Compare router modes, or any other settings, over real HTTP on this host."),
    "bench": (
        "bench:bench",
        "Benchmark any OpenAI endpoint: throughput against latency, the knee, and what holds limits.",
    ),
    "sweep": ("experiment:sweep", "Try every combination of settings, or find the highest rate that meets the limits."),
    "plan": ("plan:plan", "Find the fewest GPUs, or the cheapest, whose layout meets the limits."),
    "serve": ("serve:serve", "Serve a deployment: a frontend, the router and workers as one supervised group."),
    "vllm": ("stand_in:vllm", "Stand in for vllm serve: its flags, HTTP and metrics, in one process, without a GPU."),
    "rehearse": (
        "rehearse:rehearse",
        "Run a deployment's live code on virtual time, with faults from seeds, and check what must always hold.",
    ),
    "kubernetes": ("kubernetes:kubernetes", "Write the manifests that run a deployment in a Kubernetes cluster."),
    "workload": ("workload:workload_app", "Inspect, generate, change and convert workloads."),
    "report": ("results:report", "Write the summary, charts and report of a results folder again."),
    "compare": ("results:compare", "Compare earlier runs side by side, with the first as the baseline."),
    "export": ("results:export", "Export a results folder's figures in another format."),
    "modes": ("lists:modes", "List the router modes, and what can be added to one."),
    "planners": ("lists:planners", "List the policies that decide how many workers each pool has."),
    "model": ("model:model", "Print what a model is made of: parameters, layers, weights, KV, and its room on a GPU."),
    "hardware": ("fidelity:hardware", "List the GPUs and models whose step times are bundled, for --gpu and --model."),
    "calibrate": (
        "fidelity:calibrate",
        "Measure the step times of a real vLLM on this machine, for --timing-file.",
    ),
    "validate": ("fidelity:validate", "Compare real runs with simulated ones of the same workload, figure by figure."),
    "record": ("fidelity:record", "Record how an installed vLLM or SGLang schedules a scenario, for dynabench verify."),
    "audit": (
        "audit:audit",
        "Hold our scheduler against the installed vLLM's on your workload: the first step that differs, why, and its cost.",
    ),
    "verify": ("fidelity:verify", "Replay recordings of a real scheduler through the mocker, step by step."),
    "selftest": (
        "fidelity:selftest",
        "Run the load generator against a server of known delays and print every error.",
    ),
    "doctor": ("doctor:doctor", "Check what is installed and reachable on this host, and suggest what to do next."),
    "completion": ("completion:completion", "Print a script that completes commands and flags in your shell."),
}
"""Where each command is in `dynabench.cli`, and its line in the help."""

USAGES = {"vllm": "Usage: dynabench vllm [MODEL] [FLAGS OF VLLM SERVE] [OPTIONS]"}
"""Lines of usage that do not follow from a command's parameters."""

DOCSTRINGS: dict[str, Any] = {"help_format": "markdown", "help_flags": HELP_FLAGS}
"""The format of a command's help; a command with subcommands sets its own."""


app = CommandLine(
    name="dynabench",
    help="Which router, which settings, how many GPUs? Benchmark and simulate LLM serving without a GPU.",
    help_epilogue="Exit codes: " + "; ".join(f"{code} {text}" for code, text in EXIT_CODES.items()) + ".",
    help_format="plaintext",  # rich's Markdown and pygments would take a third of the time of listing the commands
    default_parameter=PLAIN_DEFAULTS,
    version=version,
    version_flags=["--version"],
    questions=QUESTIONS,
)
app.command(lambda: app.help_print([]), name=HELP_ALL, show=False)
for name, (place, help) in COMMANDS.items():
    options = {} if place.endswith("_app") else DOCSTRINGS | {"usage": USAGES.get(name)}
    app.command(f"dynabench.cli.{place}", name=name, help=help, **options)


def main() -> None:
    """Run the command line; bad input prints one line and exits with 2, and a signal to end exits with 130."""
    begin()
    app.console = Terminal()  # not before, because it reads how wide it is
    gc.set_threshold(20_000, 20, 50)  # most of what a command makes stays, and looking for the rest took 6% of its time
    asked: list[int] = []

    def interrupt(number: int, frame: FrameType | None) -> NoReturn:
        asked.append(number)
        raise KeyboardInterrupt

    for number in ASKING:  # commands that keep their results handle signals themselves
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, interrupt)
    try:
        code = _run()
    except KeyboardInterrupt as error:
        _end(str(error) or "interrupted")
    except Exception:
        if not asked:
            raise
        _end("interrupted")  # for example while a class was created, when Python wraps our error in another
    sys.exit(code if isinstance(code, int) else 0)


def _run() -> Any:
    """Run the requested command; return its result."""
    try:
        refuse_namesake()
    except UserError as error:
        _fail(str(error))
    for word in sys.argv[1:2]:
        if word in COMMANDS and not COMMANDS[word][0].endswith("_app"):
            app[word].help = None  # its docstring says more than its line in the list
            app[word].help_epilogue = _epilogue(word)
    try:
        command, bound, _ = app.parse_args(exit_on_error=False, print_error=False)
    except (CycloptsError, ValueError) as error:
        _fail(unknown_option(error) if isinstance(error, UnknownOptionError) else reason(error))
    try:
        code = command(*bound.args, **bound.kwargs)
        sys.stdout.flush()
    except UserError as error:
        _fail(str(error))
    except BrokenPipeError:
        _drop_output()
        sys.exit(UNREAD)
    except OSError as error:  # a full disk, a folder that is gone
        _drop_output()
        _fail(f"{error.filename or 'the output'}: {error.strerror or error}")
    return code


def _epilogue(command: str) -> str | None:
    """Return what a command's help ends with, if it is another text than that of all."""
    if command != "vllm":
        return None
    from serving.stand_in.vllm.flags.help import overview

    return overview()


def unknown_option(error: UnknownOptionError) -> str:
    """Return what to do instead of giving an option that the command lacks."""
    option = (error.token.keyword or error.token.value).partition("=")[0]
    command = " ".join(error.command_chain or ())
    own = {name for argument in error.argument_collection for name in argument.names}
    close = difflib.get_close_matches(option, own, n=2, cutoff=0.7)
    known = answer(option, command, own, lambda: dict(_options(app)))
    guess = f"did you mean {' or '.join(close)}?" if close else f"dynabench {command} {HELP_ALL} lists all options"
    return f"Unknown option: {option}; {known or guess}"


def _options(program: App, *words: str) -> Iterator[tuple[str, set[str]]]:
    """Yield each command in an app, with its options."""
    for word in program:
        if word.startswith("-"):
            continue
        if program[word].default_command is not None:
            arguments = program[word].assemble_argument_collection()
            yield (
                " ".join((*words, word)),
                {name for argument in arguments if argument.parse for name in argument.names},
            )
        yield from _options(program[word], *words, word)


def _end(message: str) -> NoReturn:
    print(message, file=sys.stderr)
    sys.exit(INTERRUPTED)


def _drop_output() -> None:
    """Keep Python from trying again, at exit, to write what could not be written."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str) -> NoReturn:
    print(f"dynabench: {shortened(printable(' '.join(message.split())))}", file=sys.stderr)
    sys.exit(USAGE_ERROR)


if __name__ == "__main__":
    main()
