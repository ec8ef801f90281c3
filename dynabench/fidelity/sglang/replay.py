"""Replay a recording of a real SGLang scheduler through the mocker's, and show the first difference."""

from dynabench.fidelity.recordings import MALFORMED, Json, RecordingError, Verdict, why_unreadable
from dynabench.fidelity.sglang.pages import Content, event_rows
from dynabench.fidelity.sglang.recordings import HOST_FREE, SENT, Action, Iteration, Recording
from mocker.sglang.hicache.pool import HostPool
from mocker.sglang.policies import NUM_HEAD_TOKENS
from mocker.sglang.request import Request
from mocker.sglang.rows import Work
from mocker.sglang.scheduler import Outcome, Scheduler

NUM_RATIO_DIGITS = 9


def verify(recording: Recording) -> Verdict:
    """Replay a recording iteration by iteration and stop at the first difference.

    Raises:
        RecordingError: it cannot be replayed.
    """
    try:
        replay = _Replay(recording)
    except MALFORMED as error:
        raise RecordingError(f"{recording.path}: cannot be replayed ({why_unreadable(error)})") from error
    num_events = 0
    for iteration in recording.iterations:
        number = iteration.number
        try:
            difference = replay.compare(iteration)
        except MALFORMED as error:
            raise RecordingError(
                f"{recording.path}, step {number}: cannot be replayed ({why_unreadable(error)})"
            ) from error
        if difference is not None:
            return Verdict(recording.path, "sglang", recording.version, number, num_events, difference)
        num_events += len(iteration.events)
    if replay.num_unfinished and not replay.is_hanging:
        raise RecordingError(
            f"{recording.path}: ends after {len(recording.iterations)} steps, but {replay.num_unfinished} of its requests "
            "are unfinished"
        )
    return Verdict(recording.path, "sglang", recording.version, len(recording.iterations), num_events, None)


class _Replay:
    """The mocker's scheduler, driven like SGLang's."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self._config = recording.config
        page_size = recording.config.page_size
        self._scheduler = Scheduler(
            recording.config, recording.num_tokens // page_size, recording.num_host_tokens // page_size
        )
        self._requests: dict[str, Request] = {}
        self._in_flight: list[tuple[int, Work]] = []
        self._next_action = 0
        self.is_hanging = False
        """Whether requests wait that SGLang never admits."""

    @property
    def num_unfinished(self) -> int:
        """Requests that still wait or run."""
        return sum(not request.ending for request in self._requests.values())

    def compare(self, iteration: Iteration) -> Json | None:
        """Repeat an iteration, and return the first difference in what it did."""
        difference = self._act(iteration.number)
        if difference is not None:
            return difference
        scheduler = self._scheduler
        work = scheduler.schedule()
        self.is_hanging = work.kind == "idle" and bool(scheduler.waiting)
        ours = self._scheduled(work)
        if difference := _difference(iteration.number, iteration.scheduled, ours):
            return difference
        if difference := _difference(iteration.number, iteration.processed, self._process(iteration.number, work)):
            return difference
        tree = scheduler.pool.tree
        events, tree.events = event_rows(tree.events, self._recording.hash_bits), []
        return _difference(iteration.number, {"events": iteration.events}, {"events": events})

    def _act(self, step: int) -> Json | None:
        """Carry out what was done before a step."""
        actions = self._recording.actions
        while self._next_action < len(actions) and actions[self._next_action].before_step <= step:
            action = actions[self._next_action]
            self._next_action += 1
            if action.kind == "add":
                self._add(action)
            elif action.kind == "end_copy":
                self._end_copy(is_store=action.is_store)
            elif action.kind == "abort":
                self._abort(action.id)
            elif (is_done := self._scheduler.flush()) is not action.is_done:
                return {"step": step, "what": "flush", "sglang": action.is_done, "mocker": is_done}
        return None

    def _add(self, action: Action) -> None:
        if action.id in self._requests:
            raise ValueError(f"request {action.id!r} is added twice")
        is_refused = len(action.prompt) >= self._scheduler.max_input_tokens
        prompt = [0] if is_refused else action.prompt  # what SGLang does to a prompt that is too long
        content = Content(prompt + action.output, self._config.page_size, action.salt, action.extra_key)
        request = Request(
            action.id,
            content.chain(),
            num_prompt=len(prompt),
            max_new=action.max_new,
            stop_after=action.stop_after,
            ignores_eos=action.ignores_eos,
            priority=action.priority,
            head=None if NUM_HEAD_TOKENS % self._config.page_size == 0 else content.head(NUM_HEAD_TOKENS),
        )
        request.is_marked = is_refused
        self._requests[action.id] = request
        self._scheduler.add(request)

    def _end_copy(self, *, is_store: bool) -> None:
        pool = self._scheduler.pool
        if not isinstance(pool, HostPool):
            raise ValueError("a copy ends, but there is no host memory")
        pool.end_oldest(is_store=is_store)

    def _abort(self, prefix: str) -> None:
        """Abort all requests whose names begin so, waiting ones from the last."""
        waiting = [request for request in self._scheduler.waiting if str(request.id).startswith(prefix)]
        others = [each for each in self._requests.values() if str(each.id).startswith(prefix) and each not in waiting]
        for request in [*waiting[::-1], *others]:
            self._scheduler.abort(request)

    def _scheduled(self, work: Work) -> Json:
        scheduler = self._scheduler
        rows = [[request.id, before, count] for request, before, count in work.prefills]
        return {
            "kind": work.kind,
            "reqs": rows + [[request.id, request.committed - 1, 1] for request in work.decodes],
            "decode_rows": len(work.decodes) if work.kind == "mixed" else 0,
            "chunked": None if work.chunked is None else work.chunked.id,
            "running": _ids(scheduler.running.requests),
            "waiting": _ids(scheduler.waiting),
            "requeued": _ids(work.requeued),
            "full": scheduler.running.is_full,
        } | self._counts("")

    def _counts(self, suffix: str) -> Json:
        pool, ratio = self._scheduler.pool, round(self._scheduler.ratio.now, NUM_RATIO_DIGITS)
        host_free = pool.hosted.num_host_free * pool.page_size if isinstance(pool, HostPool) else 0
        return {
            f"free{suffix}": pool.free,
            f"evictable{suffix}": pool.evictable,
            f"ratio{suffix}": ratio,
            f"{HOST_FREE}{suffix}": host_free,
        }

    def _process(self, step: int, work: Work) -> Json:
        """Process the result that SGLang processed in this step."""
        scheduler, is_async = self._scheduler, self._config.is_async
        outcome, processed = Outcome([], []), None
        scheduler.sends_events = False
        if not is_async and work.kind != "idle":
            outcome = scheduler.process(work)
        elif self._in_flight:
            processed, before = self._in_flight.pop()
            outcome = scheduler.process(before)
        elif work.kind == "idle":
            scheduler.rest()
        sends = scheduler.sends_events
        if is_async and work.kind != "idle":
            self._in_flight.append((step, work))
        return {
            "processed": processed,
            "tokens": [self._token(request) for request in outcome.tokens],
            "finished": [[request.id, request.ending] for request in outcome.finished],
            "aborted": _ids(scheduler.take_aborted()),
            SENT: sends,
        } | self._counts("_after")

    @staticmethod
    def _token(request: Request) -> list[object]:
        content = request.chain.payload
        assert isinstance(content, Content)
        return [request.id, content.tokens[request.known - 1]]


def _ids(requests: list[Request]) -> list[object]:
    return [request.id for request in requests]


def _difference(step: int, expected: Json, ours: Json) -> Json | None:
    """Return the first recorded fact that differs from ours."""
    for key, value in expected.items():
        if ours[key] != value:
            return {"step": step, "what": key, "sglang": value, "mocker": ours[key]}
    return None
