"""The delays between a client and an engine, in virtual time."""

from dataclasses import dataclass
from typing import NamedTuple

from foundation.settings import CheckedSettings, NotNegative
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.files import read_calibration


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadConfig(CheckedSettings):
    """The delays of a request between its client and the engine, in virtual time; a live run has real ones."""

    request_overhead_ms: NotNegative | None = None
    """Time from the client to the engine's queue: HTTP, parsing, routing, hops (ms; default: the calibration's or the GPU engine's, else 0)."""

    prompt_overhead_us: NotNegative | None = None
    """The same for each prompt token: tokenizing, copying (us; default: the calibration's, else 0)."""

    request_spacing_ms: NotNegative | None = None
    """How long a frontend is busy with a request; requests that arrive together reach the engines this far apart (ms;
    default: the calibration's, else 0)."""

    answer_overhead_ms: NotNegative | None = None
    """Time from the end of a step to the client (ms; default: the calibration's, else 0)."""

    handover_overhead_ms: NotNegative | None = None
    """Time from the end of a prefill to the decode worker's queue: the answer, routing, hops; none if decode workers
    are asked first (ms; default: 0)."""


class Overhead(NamedTuple):
    """Times (s) that are added outside the engine."""

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    spacing_s: float = 0.0
    """Time between two requests that arrive at once."""
    answer_s: float = 0.0
    handover_s: float = 0.0

    def before(self, num_prompt: int) -> float:
        """Return the time from the client to the engine's queue (s)."""
        return self.request_s + num_prompt * self.prompt_token_s


def overhead_of(config: OverheadConfig, timing: TimingConfig) -> Overhead:
    """Return the times that are set, and for the others those that belong to the engine's step times."""
    measured = _measured(timing)
    given = (
        config.request_overhead_ms,
        config.prompt_overhead_us,
        config.request_spacing_ms,
        config.answer_overhead_ms,
        config.handover_overhead_ms,
    )
    units = (1e-3, 1e-6, 1e-3, 1e-3, 1e-3)
    return Overhead(
        *(known if value is None else value * unit for value, unit, known in zip(given, units, measured, strict=True))
    )


def _measured(timing: TimingConfig) -> Overhead:
    if timing.calibration is not None:
        found = read_calibration(timing.calibration)["overhead"]
        return Overhead(
            request_s=found["request_ms"] * 1e-3,
            prompt_token_s=found["prompt_token_us"] * 1e-6,
            spacing_s=found["spacing_ms"] * 1e-3,
            answer_s=found["answer_ms"] * 1e-3,
        )
    if timing.timing_name == "roofline" and timing.gpu is not None:
        engine = find_engine(timing.host_times, find_gpu(timing.gpu).architecture)
        return Overhead(engine.request_s, engine.prompt_token_s)
    return Overhead()
