"""What a call from Python asks for: its arguments as the settings of a command."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

from dynabench.api.arguments import mapping_of, path_of, texts_of
from dynabench.api.beside_a_loop import beside_a_loop
from dynabench.api.deployment import Deployment, deployment_of
from dynabench.api.notebook import terminal
from dynabench.api.own import is_own_object, named, placed
from dynabench.api.result import Result
from dynabench.arm import Settings
from dynabench.deployment.file import as_plain
from dynabench.experiment.manifest import CALL
from dynabench.experiment.settings import ExperimentConfig
from dynabench.interrupt import Interrupt
from dynabench.terminal import Terminal
from foundation.errors import UserError
from foundation.own_code import GIVEN, shown
from foundation.settings import settings_of
from foundation.text import instead_of
from workloads import Workload

AnyDeployment = Deployment | str | Path | None
AnyWorkload = Workload | str | Path | None
Limits = str | Sequence[str]
OF_FILES = ("metrics_like", "format", "columns", "trace_block_size", "router_mode")
"""Options of commands that belong to `Workload.read` here, or have a parameter of their own."""


class CommandCall:
    """A call: what its command is asked for."""

    def __init__(
        self,
        command: str,
        workload: AnyWorkload,
        deployment: AnyDeployment,
        vary: Mapping[str, Iterable[Any]] | None,
        slo: Limits,
        repeats: int,
        seed: int,
        out: str | Path | None,
        options: Mapping[str, Any],
    ) -> None:
        """Take the arguments of a command.

        Raises:
            UserError: one is invalid.
        """
        if wrong := next((name for name in OF_FILES if name in options), None):
            hint = "vary={'router_mode': [...]}, or the deployment" if wrong == "router_mode" else "Workload.read"
            raise UserError(f"{wrong} is no option of {command}; give it to {hint}")
        self.workload, self.deployment = workload_of(workload), deployment_of(deployment)
        axes = dict(_axis(name, values) for name, values in mapping_of("vary", vary, "{'workers': [2, 4]}").items())
        _check_names(axes)
        modes = axes.pop("router_mode", [self.deployment.router_mode])
        self.varied = frozenset(axes)
        self.options: dict[str, Any] = {
            "router_mode": tuple(modes),
            "vary": tuple(f"{name}={','.join(map(_text, values))}" for name, values in axes.items()),
            "slo": texts_of("slo", slo, "ttft.p99 <= 2s"),
            "repeats": repeats,
            "seed": seed,
            "out": None if out is None else path_of("out", out),
            **options,
        }
        said = {"vary": vary, "slo": slo, "repeats": repeats, "seed": seed, **options}
        shown_options = ", ".join(
            f"{name}={_said(value)}" for name, value in said.items() if value not in (None, (), {})
        )
        self._call = f"dynabench.{command}(..., {shown_options})"

    def fix(self, option: str, setting: str, value: Any) -> None:
        """Give a plan the one value of an option that the deployment names, as its `setting`, unless that is varied.

        Raises:
            UserError: the option has another value.
        """
        if not self.deployment.chooses(setting) or self.varied & {option, setting}:
            return
        given = self.options.get(option, value)
        if given not in (value, [value], (value,)):
            raise UserError(f"{option} is {given!r}, but the deployment has {setting} {value!r}; leave one out")
        self.options[option] = (value,)

    def settings(self, *kinds: type) -> list[Any]:
        """Return settings of these kinds; an option belongs to the first that has it.

        Raises:
            UserError: none has it.
        """
        names = {kind: {field.name for field in fields(kind)} for kind in kinds}
        given: dict[type, dict[str, Any]] = {kind: {} for kind in kinds}
        for name, value in self.options.items():
            kind = next((kind for kind in kinds if name in names[kind]), None)
            if kind is None:
                raise UserError(f"{name} is unknown; {instead_of(name, sorted(set().union(*names.values())))}")
            given[kind][name] = value
        for kind in kinds:  # one seed for all
            if "seed" in names[kind]:
                given[kind].setdefault("seed", self.options["seed"])
        return [settings_of(kind, given[kind]) for kind in kinds]

    def compared(self, clock: Literal["virtual", "wall"], progress: bool | None, *kinds: type) -> Result:
        """Run an experiment with settings of these kinds: of the workload, of the load, and perhaps of the client."""
        from dynabench.experiment.run import run_experiment

        experiment, *others = self.settings(ExperimentConfig, *kinds)
        given, is_kept = (
            (clock, self.workload, experiment, Settings(self.deployment, *others)),
            experiment.out is not None,
        )

        def carry_out(lent: Interrupt | None) -> Result:
            return Result(*run_experiment(*given, console=console, is_kept=is_kept, interrupt=lent))

        with self.shown(progress) as console:
            return beside_a_loop(carry_out) if clock == "wall" else carry_out(None)

    @contextmanager
    def shown(self, progress: bool | None) -> Iterator[Terminal]:
        """Yield where progress is shown, and let results say what was called."""
        token = CALL.set(self._call)
        try:
            with terminal(progress) as console:
                yield console
        finally:
            CALL.reset(token)

    def refuse_to_travel(self, backend: str) -> None:
        """Refuse to send objects of the user's own to other hosts.

        Raises:
            UserError: there is one.
        """
        if backend == "local":
            return
        said = repr((self.options["router_mode"], self.options["vary"], as_plain(self.deployment)))
        if mine := [name for path, name in GIVEN.items() if path in said]:
            raise UserError(
                f"{mine[0]} is a Python object, which stays on this host, but backend is {backend}; put it into a file that every "
                "host has, and name that: FILE.py"
            )


def workload_of(given: AnyWorkload) -> Workload | tuple[Path, ...]:
    """Return a workload, or the files of one that was given by its path.

    Raises:
        UserError: it is something else.
    """
    match given:
        case None:
            return ()
        case Workload():
            return given
        case str() | Path():
            return (Path(given),)
    raise UserError(
        f"expected a Workload or the path of one, not {type(given).__name__}; a frame becomes one by Workload.from_frame"
    )


def _axis(name: str, values: Any) -> tuple[str, list[Any]]:
    """Return a setting and its values, with names for objects of the user's own."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        raise UserError(f"vary {name!r} is {values!r}; expected a list of values")
    values = list(values)
    place = placed(name, values)
    return place, [named(value, place) for value in values]


def _check_names(axes: Mapping[str, Sequence[Any]]) -> None:
    """Refuse two objects with one name: results could not tell them apart."""
    for values in axes.values():
        names = [shown(value) for value in values if isinstance(value, str)]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UserError(f"{twice} is given twice; give one of them another name (its __name__)")


def _text(value: Any) -> str:
    """Return a value as `--vary` takes it."""
    match value:
        case None:
            return "none"
        case bool():
            return str(value).lower()
        case str() if "," in value:
            return f"[{value}]"
    return str(value)


def _said(value: Any) -> str:
    """Return how a call shows a value."""
    match value:
        case Mapping():
            return "{" + ", ".join(f"{name!r}: {_said(its)}" for name, its in value.items()) + "}"
        case list() | tuple():
            return "[" + ", ".join(map(_said, value)) + "]"
    return getattr(value, "__name__", "...") if is_own_object(value) else repr(value)
