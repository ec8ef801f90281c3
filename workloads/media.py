"""Images and other media in the prompts of a file: whether what its requests say of them can be."""

from typing import TYPE_CHECKING

from workloads.request import Media, Request, WorkloadError

if TYPE_CHECKING:
    from workloads.columns import RequestColumns


class MediaCheck:
    """Checks the media of a file's requests, one request after another."""

    def __init__(self) -> None:
        self._tokens: dict[str, int] = {}
        self._shown: dict[int, tuple[tuple[str, int], ...]] = {}  # by hash id: items in its block, and where they begin

    @property
    def has_any(self) -> bool:
        """Whether any request had media."""
        return bool(self._tokens)

    def problem(self, request: Request, block_size: int) -> str | None:
        """Return what is wrong with the media of a request, if anything; else remember them."""
        end = 0
        for number, item in enumerate(request.media):
            if problem := self._of_item(item, end, request.input_length):
                return f"media[{number}]: {problem}"
            end = item.offset + item.tokens
        return self._of_blocks(request, block_size)

    def problem_of_text(self, request: Request) -> str | None:
        """Return what is wrong with a request without media, if anything: blocks of text in which others show something."""
        for block, id in enumerate(request.hash_ids if self._shown else ()):
            if shown := self._shown.get(id):
                return (
                    f"hash_ids[{block}] is {id}, a block of text, and in another request {_named(shown)}; expected "
                    "other ids for blocks with media"
                )
        return None

    def _of_item(self, item: Media, least: int, most: int) -> str | None:
        if not item.id:
            return "id must not be empty"
        if item.tokens < 1:
            return f"tokens must be at least 1, not {item.tokens}"
        if item.offset < least:
            return f"offset must be at least {least}, where the item before ends, not {item.offset}"
        if item.offset + item.tokens > most:
            return f"it ends at {item.offset + item.tokens}; expected at most input_length, {most}: its tokens are part of the prompt"
        if (tokens := self._tokens.setdefault(item.id, item.tokens)) != item.tokens:
            return f"{item.id!r} has {item.tokens} tokens; expected {tokens}, as in an earlier request: equal ids are equal items"
        return None

    def _of_blocks(self, request: Request, size: int) -> str | None:
        """Compare what the blocks of a request show with what the same blocks of others do."""
        places: dict[int, list[tuple[str, int]]] = {}
        for item in request.media:
            for block in range(item.offset // size, (item.offset + item.tokens - 1) // size + 1):
                places.setdefault(block, []).append((item.id, item.offset - block * size))
        for block, id in enumerate(request.hash_ids):
            mine = tuple(places.get(block, ()))
            if (other := self._shown.setdefault(id, mine)) != mine:
                return (
                    f"hash_ids[{block}] is {id}, {_named(mine)}, and in an earlier request {_named(other)}; "
                    "expected other ids for blocks with other media"
                )
        return None


def _named(shown: tuple[tuple[str, int], ...]) -> str:
    return f"a block with {', '.join(f'{id!r} at {offset}' for id, offset in shown)}" if shown else "a block of text"


def refuse_media(requests: "RequestColumns", name: str, what: str) -> None:
    """Refuse a workload with media where they would be lost, or cut.

    Raises:
        WorkloadError: it has any.
    """
    if requests.has_media:
        raise WorkloadError(f"{name}: requests have media, which {what}; expected none")
