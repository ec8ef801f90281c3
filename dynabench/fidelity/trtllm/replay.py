"""Replay a recording of TensorRT-LLM's scheduler through the mocker's, and show the first difference."""

from pathlib import Path
from typing import NoReturn

from dynabench.fidelity.recordings import MALFORMED, Json, RecordingError, Verdict, why_unreadable
from dynabench.fidelity.trtllm.recordings import VERSION, Arrival, Recording
from mocker.timing.config import TimingConfig
from mocker.trtllm.block_pool import OutOfBlocksError
from mocker.trtllm.rank import Rank, RankStep
from mocker.trtllm.request import Request
from mocker.trtllm.scheduler import Iteration, Scheduler


def verify(recording: Recording) -> Verdict:
    """Replay a recording step by step and stop at the first difference in any of its fields.

    Raises:
        RecordingError: it cannot be replayed.
    """
    try:
        replay = _Replay(recording)
    except MALFORMED as error:
        raise RecordingError(f"{recording.path}: cannot be replayed ({why_unreadable(error)})") from error
    for number, row in enumerate(recording.steps):
        try:
            difference = _first_difference(number, row, replay.step(number))
        except (*MALFORMED, AssertionError, OutOfBlocksError) as error:
            raise RecordingError(
                f"{recording.path}, step {number}: cannot be replayed ({why_unreadable(error)})"
            ) from error
        if difference is not None:
            return Verdict(recording.path, "trtllm", VERSION, number, 0, difference)
    if replay.num_unfinished:
        raise RecordingError(
            f"{recording.path}: ends after {len(recording.steps)} steps, but {replay.num_unfinished} of its requests are "
            "unfinished"
        )
    return Verdict(recording.path, "trtllm", VERSION, len(recording.steps), 0, None)


def step_times(path: Path, timing: TimingConfig) -> NoReturn:
    """Refuse: recordings of TensorRT-LLM's scheduler classes ran no model.

    Raises:
        RecordingError: always.
    """
    raise RecordingError(f"{path}: contains no times; TensorRT-LLM's scheduler was recorded without a model")


class _Replay:
    """The mocker's scheduler, driven like TensorRT-LLM's."""

    def __init__(self, recording: Recording) -> None:
        self._settings = recording.settings
        self._scheduler = Scheduler(recording.settings)
        self._transfer_iters = recording.transfer_iters
        self._arrivals: dict[int, list[Arrival]] = {}
        self._cancels: dict[int, list[Arrival]] = {}
        for arrival in recording.arrivals:
            self._arrivals.setdefault(arrival.step, []).append(arrival)
            if arrival.cancelled_at is not None:
                self._cancels.setdefault(arrival.cancelled_at, []).append(arrival)
        self._transfers: dict[int, list[Request]] = {}  # step -> requests whose KV has come then

    @property
    def num_unfinished(self) -> int:
        """Requests that still wait or run."""
        scheduler = self._scheduler
        return len(scheduler.waiting) + sum([len(rank.active) for rank in scheduler.ranks])

    def step(self, number: int) -> Json:
        """Carry out a step, and return what would be recorded of it."""
        scheduler = self._scheduler
        facts: Json = {"step": number, **self._receive(number)}
        for request in self._transfers.pop(number, ()):
            scheduler.end_transfer(request)
        iteration = scheduler.schedule()
        admitted = [[request.id for request in requests] for requests in iteration.admitted]
        facts |= {"admit": admitted[0]} if self._settings.num_ranks is None else {"route": admitted}
        ranks = [self._scheduled(*each, iteration) for each in zip(scheduler.ranks, iteration.ranks, strict=True)]
        for step in iteration.ranks:
            self._transfers.setdefault(number + self._transfer_iters, []).extend(step.passed.inits)
        settled = [scheduler.settled_step(index) for index in range(len(ranks))]
        ended = scheduler.update(self._accepted(settled))
        if scheduler.dropped:
            facts["dropped"] = [request.id for request in scheduler.dropped]
        for rank, row, gone in zip(scheduler.ranks, ranks, ended, strict=True):
            row |= _ended(rank, gone)
        facts |= ranks[0] if self._settings.num_ranks is None else {"ranks": ranks}
        return (
            facts
            | self._waits()
            | {"waiting": len(scheduler.waiting)}
            | ({} if iteration.is_forward else {"idle": True})
        )

    def _receive(self, number: int) -> Json:
        """Queue what arrives, and cancel what is cancelled; return who is concerned."""
        scheduler = self._scheduler
        facts: Json = {}
        arriving = self._arrivals.get(number, [])
        for arrival in arriving:
            scheduler.add(arrival.request)
        if arriving:
            facts["arrive"] = [arrival.request.id for arrival in arriving]
        cancels = [arrival.request for arrival in self._cancels.get(number, [])]
        if cancels:
            facts["abort"] = [request.id for request in cancels]
        for request in cancels:
            scheduler.cancel(request)
        return facts

    def _scheduled(self, rank: Rank, step: RankStep, iteration: Iteration) -> Json:
        """Return what was decided for a rank."""
        generating = [request.id for request in step.batch.generating]
        facts: Json = {
            "fit": len(step.passed.requests),
            "paused": [request.id for request in step.passed.paused],
            "mb_ctx": [[request.id, chunk, credit] for request, chunk, credit in step.planned],
            "mb_gen": [] if step.is_padded else generating,
        }
        if step.passed.inits:
            facts["init"] = [request.id for request in step.passed.inits]
        if step.is_held:
            facts["held"] = True
        if step.is_padded:
            facts["padded"] = True
        if iteration.is_forward:
            facts["ctx"] = [[request.id, start, chunk] for request, start, chunk in step.chunks]
            facts |= {"gen": generating, "tok": step.num_tokens}
        if step.hits:
            facts["reuse"] = {str(request.id): count for request, count in step.hits.items()}
        if step.trimmed:
            facts["trim"] = {str(request.id): [before, request.chunk] for request, before in step.trimmed.items()}
        return facts | {"free": rank.pool.num_free}

    def _accepted(self, settled: list[RankStep | None]) -> dict[Request, int]:
        """Return how many guesses are accepted: the recordings' stand-in for a sampler."""
        accepted, num_outcomes = {}, self._settings.max_draft_len + 1
        for step in settled:
            for request in step.batch.generating if step is not None else ():
                if not request.is_dummy:
                    num_outputs = request.num_before + request.num_outputs
                    accepted[request] = (7 * int(request.id) + 3 * num_outputs) % num_outcomes
        return accepted

    def _waits(self) -> Json:
        scheduler = self._scheduler
        if self._settings.num_ranks is not None:
            balance = scheduler.balance
            return {"waits": [0, 0] if balance is None else [balance.num_waited, balance.num_batching]}
        return {} if scheduler.batch_waiting is None else {"waits": scheduler.batch_waiting.num_waited}


def _ended(rank: Rank, gone: list[Request] | None) -> Json:
    """Return the state of a rank at the end of a step."""
    facts: Json = {} if gone is None else {"fin": [[request.id, _reason(request)] for request in gone]}
    return facts | {
        "free_end": rank.pool.num_free,
        "cached": rank.pool.num_cached_blocks,
        "evicted": rank.pool.num_evicted,
        "active": [request.id for request in rank.active],
    }


def _reason(request: Request) -> str:
    if request.is_cancelled:
        return "abort"
    return "stop" if request.has_stopped else "length"


def _first_difference(number: int, theirs: Json, ours: Json) -> Json | None:
    """Return the first recorded field that differs from ours, or that only one of both has."""
    for key in [*theirs, *[key for key in ours if key not in theirs]]:
        if theirs.get(key) != ours.get(key):
            if key == "ranks":
                return _difference_of_ranks(number, theirs[key], ours[key])
            return {"step": number, "what": key, "trtllm": theirs.get(key), "mocker": ours.get(key)}
    return None


def _difference_of_ranks(number: int, theirs: list[Json], ours: list[Json]) -> Json | None:
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        difference = _first_difference(number, their, our)
        if difference is not None:
            return difference | {"what": f"{difference['what']} of rank {rank}"}
    return None
