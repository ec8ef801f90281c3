"""What lies between a client and an engine, in virtual time."""

from typing import NamedTuple

from dynabench.experiment.settings import OverheadConfig
from mocker.timing.catalog import find_engine, find_gpu
from mocker.timing.config import TimingConfig
from mocker.timing.files import read_calibration


class Overhead(NamedTuple):
    """Times (s) that are added outside of the engine."""

    request_s: float = 0.0
    prompt_token_s: float = 0.0
    spacing_s: float = 0.0
    """Between two requests that come at once."""
    answer_s: float = 0.0

    def before(self, num_prompt: int) -> float:
        """Return the time from the client to the engine's queue (s)."""
        return self.request_s + num_prompt * self.prompt_token_s


def overhead_of(config: OverheadConfig, timing: TimingConfig) -> Overhead:
    """Return the times as given, else as the engine's step times come with them."""
    measured = _measured(timing)
    given = (
        config.request_overhead_ms,
        config.prompt_overhead_us,
        config.request_spacing_ms,
        config.answer_overhead_ms,
    )
    units = (1e-3, 1e-6, 1e-3, 1e-3)
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
        return Overhead(find_engine(timing.timed_as, find_gpu(timing.gpu).architecture).request_s)
    return Overhead()
