"""What holds in every rehearsal, whatever goes wrong. Each has a name and a sentence; docs/rehearsal.md lists them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dynabench.rehearsal.client import Answer
from dynabench.rehearsal.stage import Stage
from serving.runtime.address import INSTANCES
from serving.runtime.memory.network import Network

INVARIANTS = {
    "ends-once": "every request ends exactly once: with its last token, with an error, or as its client leaves",
    "right-text": "an answer that ends well has the text that it has without faults",
    "counted": "an answer that ends well has as many tokens as were asked for, and the usage says so",
    "bounded": "no request takes longer than its bound: what it takes without faults, and the patience of each fault",
    "no-loss": "a request fails only if faults could not be survived: more than its migrations, or no worker was there",
    "released": "when all requests are over, nothing is booked at routers, and no engine has a sequence or a used block",
    "forgotten": "when leases have run out, discovery knows only programs that run",
    "known": "when events have settled, each router knows the blocks that its engines have, and no others",
    "alive": "no program ends by an error, and none logs one that is a defect of its own",
    "serves-again": "when all faults are over, a request is answered",
}
"""The sentence of each, by name."""


class Violation(NamedTuple):
    """An invariant that did not hold."""

    invariant: str
    what: str

    def __str__(self) -> str:
        """Name it, and say what was found."""
        return f"{self.invariant}: {self.what}"


def of_answers(answers: Sequence[Answer], texts: Mapping[int, str], bound_s: float) -> Iterator[Violation]:
    """Check what came of each request.

    Args:
        answers: what came of each.
        texts: the texts without faults, by request.
        bound_s: how long a request may take (s).
    """
    for answer in answers:
        asked = answer.question
        name = f"request {asked.number}"
        if answer.num_ends != 1:
            yield Violation("ends-once", f"{name} ended {answer.num_ends} times")
        if (took := answer.ended_s - answer.asked_s) > bound_s:
            yield Violation("bounded", f"{name} took {took:.3f} s, more than {bound_s:g} s")
        if answer.has_left:
            continue
        if not answer.is_right:
            continue
        if asked.number in texts and answer.text != texts[asked.number]:
            yield Violation(
                "right-text", f"{name} has {answer.text!r:.60}, and without faults {texts[asked.number]!r:.60}"
            )
        if answer.num_tokens != asked.max_tokens:
            yield Violation("counted", f"{name}: the usage has {answer.num_tokens} tokens of {asked.max_tokens}")


def of_failures(answers: Sequence[Answer], *, may_fail: bool) -> Iterator[Violation]:
    """Check that requests failed only if something could make them."""
    failed = [answer for answer in answers if answer.error and not answer.has_left]
    if failed and not may_fail:
        yield Violation(
            "no-loss",
            f"{len(failed)} requests failed, request {failed[0].question.number} with: {failed[0].error:.200}",
        )


def at_rest(stage: Stage) -> Iterator[Violation]:
    """Check that nothing is left of requests that are over."""
    for frontend in stage.running(stage.frontends):
        for models in frontend.frontend:
            for pool in models.pools():
                for rank, books in pool.books():
                    if books.num_requests:
                        whose = f"{frontend.program.name} has {books.num_requests} requests"
                        yield Violation("released", f"{whose} booked at worker {rank.instance_id:x}")
    for worker in stage.running(stage.workers):
        for core in worker.engine.ranks if worker.engine is not None else ():
            if left := core.engine.sequences():
                yield Violation("released", f"{worker.program.name} still has {len(left)} sequences")
            elif used := core.engine.view().num_used_blocks:
                yield Violation("released", f"{worker.program.name} has {used} used blocks without a sequence")


def of_programs(stage: Stage) -> Iterator[Violation]:
    """Check that no program ended by itself."""
    for name, error in stage.failures():
        yield Violation("alive", f"{name} ended: {error!r:.300}")


def of_discovery(network: Network, stage: Stage) -> Iterator[Violation]:
    """Check that discovery knows exactly the workers that run."""
    ids = {key.rpartition("/")[2] for key in network.discovery.keys if key.startswith(INSTANCES)}
    running = {name for name in [*stage.workers, *stage.routers] if any(True for _ in stage.running([name]))}
    if len(ids) != len(running):
        yield Violation("forgotten", f"discovery knows {len(ids)} workers and routers, and {len(running)} run")
