"""What holds of requests that are over."""

from collections.abc import Iterator, Mapping, Sequence

from dynabench.rehearsal.checks.invariants import Violation
from dynabench.rehearsal.checks.met import LOSSES, OWN_S, Met
from dynabench.rehearsal.clients.client import Answer

NO_ROOM = "all workers are full"
"""What a frontend says that has room itself, but no worker with room: it may, where faults took workers or brought requests."""


def of_answers(answers: Sequence[Answer], texts: Mapping[int, str], met: Met) -> Iterator[Violation]:
    """Check what came of each request.

    Args:
        answers: what came of each.
        texts: the texts without faults, by request.
        met: the faults.
    """
    for answer in answers:
        asked = answer.question
        if answer.num_ends != 1:
            yield Violation("ends-once", f"{asked.id} ended {answer.num_ends} times")
        if (took := answer.ended_s - answer.asked_s) > (bound_s := met.bound_s(answer)):
            yield Violation("bounded", f"{asked.id} took {took:.3f} s, more than {bound_s:.3f} s")
        if answer.is_right and asked.is_too_long:
            yield Violation("counted", f"{asked.id} was answered, and does not fit its model")
        elif answer.is_right and answer.num_tokens != asked.max_tokens:
            yield Violation("counted", f"{asked.id} has {answer.num_tokens} tokens of {asked.max_tokens}")
        if answer.is_right and answer.usage != (wanted := (len(asked.prompt), asked.max_tokens)):
            yield Violation("counted", f"{asked.id}: the usage has {answer.usage} tokens, not {wanted}")
        if (right := texts.get(asked.number)) is not None:
            is_right = answer.text == right if answer.is_right else right.startswith(answer.text)
            if not is_right:
                yield Violation("right-text", f"{asked.id} has {answer.text!r:.80}, and without faults {right!r:.80}")


def of_failures(answers: Sequence[Answer], met: Met, limits: Mapping[str, int]) -> Iterator[Violation]:
    """Check that requests failed only if they could not be saved, or their frontend was full.

    Args:
        answers: what came of each.
        met: the faults.
        limits: how many requests each frontend may have in progress.
    """
    for answer in answers:
        if not answer.error or answer.has_left:
            continue
        asked = answer.question
        if asked.is_too_long and answer.status == 400:
            continue
        if NO_ROOM in answer.error and met.during(answer, LOSSES | {"overload"}):
            continue
        if answer.status == 429:
            num_open = sum(
                one.frontend == answer.frontend
                and one.asked_s <= answer.ended_s
                and one.ended_s >= answer.asked_s - OWN_S * bool(met.faults)
                for one in answers
            )
            if num_open <= (1 if NO_ROOM in answer.error else limits[answer.frontend]):
                yield Violation("shed", f"{asked.id} was refused although at most {num_open} requests were in progress")
        elif not met.excuses(answer):
            losses = "; ".join(map(str, met.during(answer, LOSSES))) or "no fault"
            yield Violation("no-loss", f"{asked.id} failed ({answer.error:.200}) with {losses}")
