"""A run as load generators see it: the answered requests, each with its times from sending."""

import datetime
from dataclasses import dataclass
from typing import Any

import numpy as np

from reports.figures.like import between_chunks
from reports.folder import Manifest
from reports.record.records import Floats, Ints, Record, Requests


@dataclass(frozen=True, slots=True)
class Answers:
    """The measured requests of one run that were answered; times in s."""

    requests: Requests
    num_failed: int
    errors: tuple[str, ...]
    """Why the others failed, one for each."""
    chunk_gaps: Floats
    """Times between chunks, pooled over all requests."""
    begun_s: float
    """When the first request, answered or not, should have been sent."""
    ended_s: float
    """When the last request, answered or not, was done."""

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def isl(self) -> Ints:
        """Tokens of each prompt."""
        return self.requests.isl

    @property
    def osl(self) -> Ints:
        """Tokens of each answer."""
        return self.requests.osl

    @property
    def sent_s(self) -> Floats:
        """When each was sent."""
        return _known(self.requests.sent_s)

    @property
    def first_s(self) -> Floats:
        """When the first token of each came."""
        return _known(self.requests.first_token_s)

    @property
    def last_s(self) -> Floats:
        """When the last token of each came."""
        return _known(self.requests.last_token_s)

    @property
    def ttft(self) -> Floats:
        """First token - sent."""
        return self.first_s - self.sent_s

    @property
    def latency(self) -> Floats:
        """Last token - sent."""
        return self.last_s - self.sent_s

    @property
    def end_s(self) -> Floats:
        """When the answer to each ended, or its last token came where that is not known."""
        done = _known(self.requests.done_s)
        return np.where(np.isnan(done), self.last_s, done)

    @property
    def wall_s(self) -> float:
        """From the first arrival to the end of the last answer."""
        return self.ended_s - self.begun_s


def answers_of(run: Record) -> Answers:
    """Return the answers of a run, without its warm-up.

    Raises:
        ValueError: no request was answered.
    """
    measured = run.measured
    requests, answered = measured.requests, measured.requests.succeeded
    if not answered.any():
        raise ValueError(f"no request of {run.arm} was answered, so there are no figures to write")
    known = requests[answered]
    ends = np.ma.concatenate([requests.done_s.compressed(), known.last_token_s.compressed()])  # type: ignore[no-untyped-call]
    return Answers(
        requests=known,
        num_failed=int((~answered).sum()),
        errors=tuple(str(error) for error in requests.error[~answered]),
        chunk_gaps=between_chunks(measured),
        begun_s=float(requests.intended_s.min()),
        ended_s=float(ends.max()),
    )


def file_names(runs: list[Record]) -> list[str]:
    """Name each run after its arm, and its repeat if there are several, so that it can be a file's name."""
    several = len({run.repeat for run in runs}) > 1
    names = list[str]()
    for run in runs:
        plain = "".join(letter if letter.isalnum() or letter in "._=+-" else "-" for letter in run.arm).strip(".-")
        name = f"{plain or 'arm'}{f'.{run.repeat}' * several}"
        names.append(name if name not in names else f"{name}.{len(names)}")
    return names


def request_rate(answers: Answers) -> float | None:
    """Return the mean rate of the intended arrivals (requests/s); None if there is no span of time."""
    arrivals = answers.requests.intended_s
    span = float(arrivals.max() - arrivals.min())
    return (len(arrivals) - 1) / span if span > 0 else None


def model_of(manifest: Manifest) -> str | None:
    """Return the name of the model that answered, if it is known."""
    engine = manifest.get("engine", {})
    each = [engine, *(one for one in engine.values() if isinstance(one, dict))]
    names: list[str] = [one.get("model_name") or one.get("model") for one in each]
    return next(filter(None, names), None)


def begun_at(manifest: Manifest) -> datetime.datetime:
    """Return the time that a run's own times are counted from here; folders keep when they were made, to the second.

    Raises:
        ValueError: it is not a time.
    """
    return datetime.datetime.fromisoformat(str(manifest.get("created")))


def _known(times: Any) -> Floats:
    found: Floats = np.ma.filled(times, np.nan)
    return found
