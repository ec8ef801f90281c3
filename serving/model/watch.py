"""Following the model cards of a network. Invalid cards are logged and ignored, so that they hide no model."""

import logging
from collections.abc import Callable

import msgspec

from serving.model.card import ModelCard, key_prefix
from serving.model.parsers import check_parsers
from serving.runtime.ports import Discovery, Stop

log = logging.getLogger(__name__)


async def watch_cards(discovery: Discovery, on_card: Callable[[str, ModelCard | None], None], *place: str) -> Stop:
    """Report the cards of a namespace, component and endpoint (none: of all) by their keys, with None once one is gone.

    Returns once the present ones were reported.
    """

    def on_change(key: str, value: bytes | None) -> None:
        try:
            card = None if value is None else _with_known_parsers(key, ModelCard.parse(key, value))
        except ValueError as error:
            log.warning("%s in discovery is not a valid model card and is ignored: %s", key, error)
        else:
            on_card(key, card)

    return await discovery.watch(key_prefix(*place), on_change)


async def present_cards(discovery: Discovery, *place: str) -> list[ModelCard]:
    """Return the present cards of a namespace, component and endpoint."""
    cards: dict[str, ModelCard | None] = {}
    stop = await watch_cards(discovery, cards.__setitem__, *place)
    stop()
    return [card for card in cards.values() if card is not None]


def _with_known_parsers(key: str, card: ModelCard) -> ModelCard:
    """Return the card without parsers that only another version knows: what they would parse stays text."""
    try:
        check_parsers(card.tool_call_parser, card.reasoning_parser)
    except ValueError as error:
        log.warning("%s in discovery: %s; its answers are not parsed", key, error)
        return msgspec.structs.replace(card, tool_call_parser="", reasoning_parser="")
    return card
