"""Model cards as they come and go, on a network in memory."""

import asyncio
import logging

import msgspec

from serving.model.card import ModelCard, ModelType
from serving.model.watch import present_cards, watch_cards
from tests.routing.network import Network


def card(id, namespace="dynamo", **options):
    return ModelCard(
        name="m",
        model_type=ModelType.Backend,
        namespace=namespace,
        component="backend",
        endpoint="generate",
        instance_id=id,
        **options,
    )


def put(network, card):
    network.change(card.key, msgspec.json.encode(card))


def test_cards_are_reported_that_are_there_that_come_change_and_go():
    async def main():
        network, seen = Network(), []
        put(network, card(1))
        stop = await watch_cards(network.join(9), lambda key, found: seen.append((key, found)))
        assert seen == [(card(1).key, card(1))]
        put(network, card(2))
        put(network, card(2, migration_limit=3))
        network.change(card(1).key, None)
        assert seen[1:] == [(card(2).key, card(2)), (card(2).key, card(2, migration_limit=3)), (card(1).key, None)]
        stop()
        put(network, card(3))
        assert len(seen) == 4

    asyncio.run(main())


def test_what_is_no_card_is_logged_and_hides_none(caplog):
    caplog.set_level(logging.WARNING)

    async def main():
        network, seen = Network(), []
        network.change("v1/mdc/dynamo/backend/generate/1", b'{"name": 1}')
        network.change("v1/mdc/dynamo/backend/generate/2", msgspec.json.encode(card(3)))  # another's key
        put(network, card(4))
        await watch_cards(network.join(9), lambda key, found: seen.append(found))
        assert seen == [card(4)]

    asyncio.run(main())
    assert caplog.text.count("is not a valid model card and is ignored") == 2


def test_a_namespace_or_an_endpoint_can_be_watched_alone():
    async def main():
        network = Network()
        here, there, beside = card(1), card(2, "other"), card(3, "dynamo2")
        for each in (here, there, beside):
            put(network, each)
        member = network.join(9)
        assert await present_cards(member) == [here, there, beside]
        assert await present_cards(member, "dynamo") == [here]
        assert await present_cards(member, *there.address) == [there]
        assert await present_cards(member, "dynamo", "backend", "gen") == []
        assert not network.watches

    asyncio.run(main())


def test_a_parser_that_only_another_version_knows_hides_no_model(caplog):
    caplog.set_level(logging.WARNING)

    async def main():
        network, seen = Network(), []
        put(network, card(1, tool_call_parser="of-next-year", reasoning_parser="qwen3"))
        put(network, card(2, tool_call_parser="hermes", reasoning_parser="qwen3"))
        await watch_cards(network.join(9), lambda key, found: seen.append(found))
        assert seen == [card(1), card(2, tool_call_parser="hermes", reasoning_parser="qwen3")]

    asyncio.run(main())
    assert caplog.text.count("tool_call_parser 'of-next-year' is unknown") == 1
