"""The picture of a rehearsal: a page with a lane for each program, its requests and faults, and what did not hold."""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from dynabench.deployment.description import Deployment
from dynabench.deployment.file import as_plain
from dynabench.rehearsal.checks.invariants import INVARIANTS, Violation
from dynabench.rehearsal.clients.client import Answer
from dynabench.rehearsal.run import Outcome
from dynabench.rehearsal.stage.stage import names_of
from dynabench.rehearsal.stage.story import Story, Stretch
from foundation.files import replace_text
from reports import page
from reports.charts import lanes
from reports.charts.drawing import ON_PAGE
from reports.charts.lanes import Flaw, Happening, Lane, Passage, Stay, Trouble
from reports.tables.grid import Grid

EVERYWHERE = "everywhere"
"""The lane of faults that meet no single program."""
REQUEST = re.compile(r"\bquestion-\d+\b")
PROGRAM = re.compile(r"[\w-]+")
REFUSED = (429, 503)
"""What a frontend says that has no place for a request."""
MOST_ROWS = 20
"""Requests beyond which their table is folded."""


def picture_of(file: Path) -> Path:
    """Return where the picture of a rehearsal is, beside the file that replays it."""
    return file.with_suffix(".html")


def write_picture(file: Path, deployment: Deployment, outcome: Outcome, story: Story) -> Path:
    """Write the picture of a rehearsal beside the file that replays it; return where it is.

    Args:
        file: replays it.
        deployment: what was rehearsed.
        outcome: what came of it.
        story: what happened.
    """
    replace_text(picture_of(file), page_of(deployment, outcome, story, f"dynabench rehearse --replay {file}"))
    return picture_of(file)


def page_of(deployment: Deployment, outcome: Outcome, story: Story, command: str) -> str:
    """Return the page of a rehearsal, which `command` replays."""
    happening = happening_of(deployment, outcome.violations, story)
    violations, count = outcome.violations, len(story.answers)
    return page.render(
        "rehearsal.html.jinja",
        [],
        title=f"Rehearsal of seed {outcome.seed}",
        subtitle=f"{count} request{'s' * (count != 1)}, {len(story.troubles)} fault{'s' * (len(story.troubles) != 1)}, "
        f"digest {outcome.digest or 'none'}",
        head={},
        alerts=[],
        verdict=f"What did not hold: {', '.join(dict.fromkeys(one.invariant for one in violations))}."
        if violations
        else "Every invariant held.",
        violations=[(str(one), INVARIANTS[one.invariant]) for one in violations],
        svg=lanes.svg(happening, lambda colour: ON_PAGE.get(colour, colour)),
        faults=[f"{one.what} {' and '.join(one.where)}".strip() + f", {_when(one, story)}" for one in story.troubles],
        requests=_table(happening, story),
        is_long=count > MOST_ROWS,
        command=command,
        settings=msgspec.json.format(msgspec.json.encode(as_plain(deployment)), indent=2).decode(),
    )


def happening_of(deployment: Deployment, violations: Sequence[Violation], story: Story) -> Happening:
    """Return what is drawn; times begin when requests could be sent."""
    named = {word for one in violations for word in PROGRAM.findall(one.what)}
    programs = {life.what: None for life in story.lives}
    met = {name for trouble in story.troubles for name in trouble.where}
    servers = [name for name in sorted(met) if name not in programs]
    everywhere = [EVERYWHERE] * any(not trouble.where for trouble in story.troubles)
    found = [Lane(name, [(-math.inf, math.inf)]) for name in (*everywhere, *servers)]
    workers, others = names_of(deployment)
    for name in dict.fromkeys((*others, *workers, *programs)):
        runs = [
            (life.began_s - story.began_s, _end(life, story, math.inf)) for life in story.lives if life.what == name
        ]
        found.append(Lane(name, runs, is_flawed=name in named))
    troubles = [
        Trouble(one.what, one.where or (EVERYWHERE,), one.began_s - story.began_s, _end(one, story, _last(story)))
        for one in story.troubles
    ]
    return Happening(found, list(_passages(story, named)), troubles, list(_flaws(violations, story)))


def _end(stretch: Stretch, story: Story, otherwise: float) -> float:
    return otherwise if stretch.ended_s is None else stretch.ended_s - story.began_s


def _last(story: Story) -> float:
    """Return when the last thing happened (s)."""
    ends = [answer.ended_s for answer in story.answers] + [one.ended_s or one.began_s for one in story.troubles]
    return max([story.checked_s, *ends]) - story.began_s


def _passages(story: Story, named: set[str]) -> Iterator[Passage]:
    deaths = {(life.what, life.ended_s) for life in story.lives if life.ended_s is not None}
    for answer in story.answers:
        name, began_s = answer.question.id, story.began_s
        ended_s = answer.ended_s or story.checked_s
        stays = [Stay(answer.frontend, answer.asked_s - began_s, ended_s - began_s)]
        for stay in story.stays:
            if stay.what == name and stay.began_s < story.checked_s:  # later, other requests have these names again
                died = [at_s for who, at_s in deaths if who == stay.where[0] and at_s >= stay.began_s]
                last_s = min([stay.ended_s or max(ended_s, stay.began_s), *died])
                stays.append(Stay(stay.where[0], stay.began_s - began_s, last_s - began_s))
        first_s = answer.first_s - began_s if answer.first_s else None
        yield Passage(name, _how(answer), f"{name} {_said(answer)}", stays, first_s, is_flawed=name in named)


def _how(answer: Answer) -> lanes.End:
    if answer.has_left:
        return "left"
    if answer.is_right:
        return "answered"
    return "refused" if answer.status in REFUSED else "failed"


def _said(answer: Answer) -> str:
    """Say how a request ended."""
    of = f"{answer.num_tokens} of {answer.question.max_tokens} tokens"
    match _how(answer):
        case "answered":
            return f"was answered with {of}"
        case "left":
            return f"ended as its client left after {of}"
        case "refused":
            return f"was refused: {answer.error:.300}"
    return f"failed after {of}: {answer.error:.300}" if answer.ended_s else f"has {of}, and did not end"


def _flaws(violations: Sequence[Violation], story: Story) -> Iterator[Flaw]:
    """Yield when each violation was seen: at the end of the request that it names, if it does not say."""
    ends = {answer.question.id: answer.ended_s for answer in story.answers if answer.ended_s}
    for one in violations:
        named = next((ends[name] for name in REQUEST.findall(one.what) if name in ends), story.checked_s)
        yield Flaw(one.invariant, named - story.began_s if one.at_s is None else one.at_s)


def _table(happening: Happening, story: Story) -> Grid:
    """Lay out what came of each request."""
    rows = []
    for passage, answer in zip(happening.passages, story.answers, strict=True):
        begin_s, end_s = passage.stays[0].begin_s, passage.stays[0].end_s
        where = ", ".join(stay.lane for stay in passage.stays)
        rows.append((passage.name, [f"{begin_s:.3f} s", f"{end_s:.3f} s", where, _said(answer)]))
    return Grid("Requests", ["asked", "ended", "where", "what came of it"], rows)


def _when(trouble: Stretch, story: Story) -> str:
    begin_s = trouble.began_s - story.began_s
    lasts_s = _end(trouble, story, _last(story)) - begin_s
    return f"at {begin_s:.3f} s" + f", for {lasts_s:.3f} s" * bool(lasts_s)
