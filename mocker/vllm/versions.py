"""What differs between the versions of vLLM whose scheduler is simulated: one switch for each rule that changed.

    EngineConfig.engine_version --> RULES[...] --> each part reads its switches once, when it is made

A new version is one more row. A rule that it changes is one more switch, which the older rows have at its old value; a rule
that no kept version follows goes, and its switch with it. `docs/decisions/0048-versions-are-rows-of-rules.md` says how a
version is taken in.
"""

import re
from typing import Final, Literal, NamedTuple

EngineVersion = Literal["0.32", "0.33"]
"""Versions of vLLM whose rules are known, the oldest first."""
NEWEST: Final[EngineVersion] = "0.33"


class Rules(NamedTuple):
    """The rules that are not the same in all versions."""

    # Scheduling
    goes_on_after_victim: bool
    """By priority, a running sequence may be its own victim. Those behind it then still get their tokens in this step."""
    seats_all_adapters: bool
    """The adapters of all running sequences have seats, not only of those with tokens in this step."""
    holds_prefills: bool
    """`prefill_schedule_interval` counts in engines without data parallelism, too."""

    # Host memory
    offers_again: bool
    """A sequence that asks host memory offers its chunks from the first one again, not only those never offered."""
    ranks_by_request: bool
    """LRU: the chunks that a request stores or finds have one rank until it ends, and among them the last goes first."""
    loads_within_step: bool
    """What is found in host memory may be loaded before the step computes, within `sync_load_budget_bytes` a step."""

    # Speculation
    caches_accepted: bool
    """Blocks that accepted tokens fill are cached when these are known, synchronously as well, not when the sequence is
    next given tokens."""
    hashes_look_ahead: bool
    """EAGLE and MTP: a block's name includes the token after it, and a look-up drops no block. With a KV connector, names
    are the old ones, and the last block of a hit is dropped."""

    # Encoders
    skips_unencoded: bool
    """A waiting sequence that cannot start because an item of its prompt cannot be encoded is passed over, and does not hold
    up those behind it."""
    holds_whole_items: bool
    """`disable_chunked_mm_input`: a chunk that starts with an item does not divide it, either."""
    frees_items_at_once: bool
    """What a drafter reads ahead neither keeps an item in the encoder's cache nor shortens the chunk before one."""

    # States
    counts_state_once: bool
    """The state at the last boundary of a prompt counts as computed in this step only in the step that stores it."""


RULES: Final[dict[EngineVersion, Rules]] = {
    "0.32": Rules(
        goes_on_after_victim=False,
        seats_all_adapters=False,
        holds_prefills=False,
        offers_again=False,
        ranks_by_request=False,
        loads_within_step=False,
        caches_accepted=False,
        hashes_look_ahead=False,
        skips_unencoded=False,
        holds_whole_items=False,
        frees_items_at_once=False,
        counts_state_once=False,
    ),
    "0.33": Rules(
        goes_on_after_victim=True,
        seats_all_adapters=True,
        holds_prefills=True,
        offers_again=True,
        ranks_by_request=True,
        loads_within_step=True,
        caches_accepted=True,
        hashes_look_ahead=True,
        skips_unencoded=True,
        holds_whole_items=True,
        frees_items_at_once=True,
        counts_state_once=True,
    ),
}


def version_of(release: object) -> EngineVersion:
    """Return whose rules a release of vLLM follows: `0.33.1` those of 0.33. Files may name anything, or `null`.

    Raises:
        ValueError: its rules are not known; the message says how to assume some.
    """
    if isinstance(release, str):
        for version in RULES:
            if release == version or release.startswith(f"{version}."):
                return version
    named = f"vLLM {release}" if release else "a vLLM whose version it does not name"
    raise ValueError(
        f"{named}; expected {' or '.join(RULES)}, whose rules are known: choose one of them with --engine-version"
        f"{_nearest(release)}, and its rules are assumed"
    )


def _nearest(release: object) -> str:
    """Name the version that is nearest to a release, if it has a number."""
    number = re.match(r"(\d+)\.(\d+)", release) if isinstance(release, str) else None
    if number is None:
        return ""
    major, minor = int(number[1]), int(number[2])
    versions = list(RULES)
    oldest_major, oldest_minor = map(int, versions[0].split("."))
    is_older = (major, minor) < (oldest_major, oldest_minor)
    return f" (the nearest is {versions[0] if is_older else versions[-1]})"
