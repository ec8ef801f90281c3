"""A step in time: when its iterations end, and its results."""

from mocker.batch import Batch
from mocker.sequence import Sequence
from mocker.timing.model import Ramp


class Step:
    """One or more iterations of one batch, until `end` (s)."""

    __slots__ = ("_origin", "_skip", "batch", "end", "num_iterations", "ramp")

    def __init__(self, batch: Batch, origin: float, ramp: Ramp, skip: int, num_iterations: int, end: float) -> None:
        self.batch = batch
        self.num_iterations = num_iterations
        self.end = end
        self._origin = origin
        self.ramp = ramp
        self._skip = skip

    @property
    def start(self) -> float:
        """When the step started (s)."""
        return self.boundary(0)

    def boundary(self, iteration: int) -> float:
        """Return when an iteration, counted within this step, starts (s)."""
        return self._origin + self.ramp.elapsed(self._skip + iteration)

    def num_ended(self, now: float) -> int:
        """Count the iterations that have ended by a time."""
        if now >= self.end:
            return self.num_iterations
        start = self.boundary(0)
        count = int((now - start) / (self.end - start) * self.num_iterations)
        while count > 0 and self.boundary(count) > now:
            count -= 1
        while self.boundary(count + 1) <= now:
            count += 1
        return count

    def first_boundary(self, now: float) -> int:
        """Return the first iteration, counted within this step from 1 on, that starts at or after a time."""
        count = self.num_ended(now)
        return count + 1 if count == 0 or self.boundary(count) < now else count

    def cut(self, now: float) -> bool:
        """End the step at the first boundary at or after a time; return whether that shortened it."""
        if self.num_iterations == 1:
            return False
        count = self.first_boundary(now)
        if count >= self.num_iterations:
            return False
        self.num_iterations = count
        self.end = self.boundary(count)
        return True

    def advance(self, num_iterations: int) -> None:
        """Drop the first iterations, which have been accounted for."""
        self._skip += num_iterations
        self.num_iterations -= num_iterations

    def row(self, num_iterations: int, num_tokens: int) -> tuple[float, float, float, int, int]:
        """Return the row of a `GapLog` for the first iterations, each with a token for `num_tokens` sequences."""
        first, slope, curve, _ = self.ramp
        skip = self._skip
        if skip:
            first, slope = first + skip * (slope + skip * curve), slope + 2 * skip * curve
        return first, slope, curve, num_iterations, num_tokens

    def __repr__(self) -> str:
        return f"Step({self.start:.6f}..{self.end:.6f} s, {self.num_iterations} iterations)"


class StepOutput:
    """The results of a step: chunks of prompts, sequences that ended their prefill, and those that finished."""

    __slots__ = ("chunks", "end", "finished", "sampled")

    def __init__(
        self, end: float, sampled: list[Sequence], finished: list[Sequence], chunks: list[tuple[Sequence, int]]
    ) -> None:
        self.end = end
        self.chunks = chunks
        self.sampled = sampled
        self.finished = finished


class CountedOutput(StepOutput):
    """The results of a step whose decodes may have several tokens each, or none."""

    __slots__ = ("emitted",)

    def __init__(self, output: StepOutput, emitted: list[tuple[Sequence, int]]) -> None:
        super().__init__(output.end, output.sampled, output.finished, output.chunks)
        self.emitted = emitted
        """The decodes that have tokens, and how many."""
