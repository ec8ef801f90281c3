"""The requests of a recording as the mocker's sequences, and the calls that vLLM's scheduler received for them."""

from collections.abc import Hashable

from dynabench.fidelity.vllm.entries import Action
from mocker import BlockChain, Sequence
from mocker.media import MediaItem
from mocker.vllm.core import VllmCore


def act(scheduler: VllmCore, sequences: dict[str, Sequence], action: Action, block_size: int) -> bool | None:
    """Repeat a call of vLLM's scheduler; for a reset, return whether it was carried out."""
    if action.kind == "add":
        if action.id in sequences:
            raise ValueError(f"request {action.id!r} is added twice")
        sequences[action.id] = sequence = _sequence(
            action, block_size, len(sequences), num_ahead=scheduler.num_named_ahead
        )
        scheduler.add(sequence)
    elif action.kind == "abort":
        scheduler.abort(sequences[action.id])
    else:
        return scheduler.reset_prefix_cache()
    return None


def content_ids(
    tokens: list[int],
    block_size: int,
    salt: str | None = None,
    adapter: str = "",
    *,
    num_ahead: int = 0,
    media: tuple[MediaItem, ...] = (),
) -> list[Hashable]:
    """Name each full block of a token sequence by its content and everything before it, and by the adapter that computes it.

    A name may include so many tokens after the block, without which it has none. The tokens of media are the same whatever
    these show, so their ids are part of the content, and where in the block they begin.
    """
    ids: list[Hashable] = []
    parent: Hashable = ("salt", salt, adapter)
    for start in range(0, len(tokens) - block_size - num_ahead + 1, block_size):
        stop = start + block_size + num_ahead
        shown = tuple([(item.id, item.offset - start) for item in media if item.end > start and item.offset < stop])
        parent = hash((parent, tuple(tokens[start:stop]), shown))
        ids.append(parent)
    return ids


def _sequence(action: Action, block_size: int, order: int, *, num_ahead: int) -> Sequence:
    stop = next((place for place, token in enumerate(action.output) if token in action.stops), None)
    chain = BlockChain(
        content_ids(
            action.prompt + action.output,
            block_size,
            action.salt,
            action.adapter,
            num_ahead=num_ahead,
            media=action.media,
        )
    )
    chain.payload = action
    return Sequence(
        action.id,
        num_prompt=len(action.prompt),
        max_tokens=action.max_tokens,
        stop_after=None if stop is None else stop + 1,
        chain=chain,
        is_remote_prefill=action.remote == "decode",
        is_remote_decode=action.remote == "prefill",
        priority=action.priority,
        adapter=action.adapter,
        media=action.media,
        arrival=order,
    )
