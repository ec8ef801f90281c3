"""A request in the mocker: its answer, which is known from the start, and how much of it was made and sent."""

from typing import Any

import numpy as np
import numpy.typing as npt

from mocker import Sequence
from serving.engines.kv.owner import Offer
from serving.engines.kv.reader import Load
from serving.engines.mock.answers.made_up import LogProbabilities
from serving.runtime.server import AnswerStream
from serving.runtime.world import world


class Live:
    """See the module."""

    __slots__ = (
        "arrival_s",
        "embedding",
        "end",
        "has_tiers",
        "is_held",
        "is_plain",
        "is_queued",
        "keys",
        "kv_name",
        "load",
        "log_probabilities",
        "made",
        "offer",
        "output",
        "prompt",
        "reason",
        "request_id",
        "room",
        "sent",
        "sequence",
        "stream",
    )

    def __init__(
        self,
        prompt: npt.NDArray[np.uint32],
        output: list[int],
        stream: AnswerStream,
        log_probabilities: LogProbabilities | None,
        sequence: Sequence,
        arrival_s: float,
    ) -> None:
        self.sequence = sequence
        """The request in the engine."""
        self.request_id = ""
        """The client's id of it; others may have the same."""
        self.is_held = False
        """Whether its call lasts until nobody will read its prompt's KV any more."""
        self.has_tiers = False
        """Whether its prompt's KV may come from beyond the GPU."""
        self.reason = ""
        """Why it ends, if that is known from the start."""
        self.is_queued = False
        """Whether the engine has it."""
        self.prompt = prompt
        self.output = output
        self.stream = stream
        self.log_probabilities = log_probabilities
        self.arrival_s = arrival_s
        self.is_plain = log_probabilities is None
        """Whether only tokens are sent until the end."""
        self.made = 0
        self.sent = 0
        self.end: dict[str, Any] | None = None
        self.embedding: list[float] | None = None
        """What is sent at the end, instead of tokens."""
        self.keys: list[int] = []
        """Keys of its prompt's blocks, if it is shared with another worker."""
        self.load: Load | None = None
        """The load of its prompt's KV, which another worker computes."""
        self.offer: Offer | None = None
        """The offer of its prompt's KV, which another worker will read."""
        self.kv_name = ""
        """The start of the name by which others ask for its prompt's KV."""
        self.room: int | None = None
        """The room in which it meets that worker."""

    def read(self, load: Load) -> None:
        """Read the prompt's KV from another worker."""
        self.load = load
        self.is_plain = False  # its first token comes with times

    def embed(self, embedding: list[float]) -> None:
        """Send a vector at the end, and nothing before."""
        self.embedding = embedding
        self.is_plain = False

    def flush(self) -> None:
        """Send what was made but not sent, and the end, unless the reader is not ready."""
        stream = self.stream
        if stream.is_blocked or stream.is_over:
            return
        tokens = self.output[self.sent : self.made]
        more = self._more(tokens) if tokens and not self.is_plain else {}
        self.sent = self.made
        if self.end is not None:
            stream.send({"token_ids": tokens} | more | self.end)
            if self.is_held:
                self.end = None
            else:
                stream.end()
        elif more:
            stream.send({"token_ids": tokens} | more)
        elif tokens:
            stream.send(tokens)

    def finish(self, **more: Any) -> None:
        """Make the next flush send the end as well."""
        sequence, load = self.sequence, self.load
        reason = self.reason or sequence.finish_reason
        self.end = {"finish_reason": reason, "cached_tokens": self.num_cached, **more}
        if self.embedding is not None:
            self.end["embedding"] = self.embedding
        if self.has_tiers and load is None:
            self.end["tier_tokens"] = {
                "host": sequence.host_tokens,
                "disk": sequence.disk_tokens,
                "store": sequence.store_tokens,
            }
        if load is None:
            self.end["times"] = self.times()

    def abort(self) -> None:
        """Send what was made and the end: nobody wants the rest."""
        self.end = {"finish_reason": "abort", "cached_tokens": self.num_cached, "times": self.times()}
        self.is_held = False
        self.flush()

    @property
    def num_cached(self) -> int:
        """How many tokens of its prompt were found in a cache: if another worker computed it, in that one's.

        A client that chose both workers need not pass on what the other one found: then all that was read counts, as in
        vLLM.
        """
        load, here = self.load, self.sequence.cached_tokens
        if load is None:
            return here
        if load.num_cached_tokens is not None:
            return load.num_cached_tokens
        if load.error is not None or load.kv is None or "transfer_end" not in load.times:
            return here
        return self.sequence.num_prompt if load.is_directed else load.kv.remote_prefill_cached_tokens

    def release(self) -> None:
        """End a call that lasted as long as its prompt's KV."""
        if self.is_held and self.end is None:
            self.stream.end()
        self.is_held = False

    def times(self) -> dict[str, float]:
        """Return when each thing happened since the request came, and how many bytes were read."""
        sequence, load = self.sequence, self.load
        started_s = sequence.first_scheduled_s
        if load is None:
            times = {"admitted": started_s, "prefill_end": sequence.first_token_s}
        else:  # a first token that came with the KV is sent when its first step is scheduled
            came_s = load.times.get("transfer_end", 0.0)
            times = load.times | {"decode_start": max(started_s, came_s) if started_s >= 0 else world().now()}
        # On its engine's clock, a late step begins before what came in the meantime.
        found = {name: max(round(time_s - self.arrival_s, 6), 0.0) for name, time_s in times.items() if time_s >= 0}
        return found if load is None else found | {"transfer_bytes": load.num_bytes}

    def _more(self, tokens: list[int]) -> dict[str, Any]:
        """Return what is sent with tokens."""
        more: dict[str, Any] = {}
        logs, is_first = self.log_probabilities, not self.sent
        if logs is not None:
            more |= logs.of_output(tokens) | (logs.of_prompt(self.prompt.tolist()) if is_first else {})
        if is_first and self.load is not None:
            more["times"] = self.times()
        self.is_plain = logs is None
        return more


def live_of(sequence: Sequence) -> Live:
    """Return the request that a sequence in the engine stands for."""
    live = sequence.payload
    assert isinstance(live, Live)
    return live
