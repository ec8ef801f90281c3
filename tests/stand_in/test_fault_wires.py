"""Faults of what others read: metrics, and KV events."""

import asyncio
from itertools import pairwise

import httpx
from starlette.responses import PlainTextResponse

from serving.frontend.dialect import OPENAI
from serving.stand_in.faults.app import faulty
from serving.stand_in.faults.events import FaultyWire
from serving.stand_in.faults.state import Faults
from serving.stand_in.faults.words import changed_faults, read_faults
from tests.support.waiting import until_async


def scraped(words, scrape, seed=0):
    """Return what scrapes of metrics that count them get."""
    seen = []

    async def count(scope, receive, send):
        seen.append(1)
        await PlainTextResponse(f"scrapes {len(seen)}")(scope, receive, send)

    async def main():
        faults = Faults(read_faults(words, seed=seed))
        transport = httpx.ASGITransport(faulty(count, faults, OPENAI, answers=()))
        try:
            async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
                return await scrape(client, faults)
        finally:
            faults.close()

    return asyncio.run(main())


def test_frozen_metrics_are_those_of_the_last_scrape_before():
    async def scrape(client, faults):
        found = [(await client.get("/metrics")).text]
        faults.answered()
        await asyncio.sleep(0)
        found += [(await client.get("/metrics")).text for _ in range(2)]
        faults.change(changed_faults(faults.config, {"metrics_freeze": None}))
        return [*found, (await client.get("/metrics")).text]

    assert scraped(["metrics_freeze=1"], scrape) == ["scrapes 1"] * 3 + ["scrapes 2"]


def test_metrics_that_freeze_before_anybody_looks_are_those_of_the_first_scrape():
    async def scrape(client, faults):
        faults.answered()
        await asyncio.sleep(0)
        return [(await client.get("/metrics")).text for _ in range(3)]

    assert scraped(["metrics_freeze=1"], scrape) == ["scrapes 1"] * 3


def test_a_share_of_scrapes_fails_and_the_same_ones_with_the_same_seed():
    async def scrape(client, faults):
        found = [(await client.get("/metrics")).status_code for _ in range(60)]
        assert faults.counts["metrics_fail"] == found.count(500)
        return found

    found = scraped(["metrics_fail=0.4"], scrape)
    assert set(found) == {200, 500}
    assert found == scraped(["metrics_fail=0.4"], scrape) != scraped(["metrics_fail=0.4"], scrape, seed=1)


def test_scrapes_may_take_their_time():
    async def scrape(client, faults):
        start = asyncio.get_running_loop().time()
        await client.get("/metrics")
        return asyncio.get_running_loop().time() - start

    assert scraped(["metrics_delay=100ms"], scrape) >= 0.1


def wired(*words, count=40, num_awaited=0):
    """Return which messages arrive, in their order, and the counts; wait for that many."""

    async def main():
        arrived, faults = [], Faults(read_faults(words))
        wire = FaultyWire(arrived.append, faults, rank=0)
        for number in range(count):
            wire(number)
        at_once = list(arrived)
        await until_async(lambda: len(arrived) >= num_awaited)
        wire.close()
        return at_once, arrived, faults.counts

    return asyncio.run(main())


def test_only_so_many_events_are_late_at_once_and_the_others_are_lost(monkeypatch):
    monkeypatch.setattr("serving.stand_in.faults.events.MAX_WAITING", 3)
    _, arrived, counts = wired("kv_events_delay=1h", count=10)
    assert (arrived, counts) == ([], {"kv_events_delay": 3, "kv_events_drop": 7})


def test_lost_events_leave_a_gap():
    _, arrived, counts = wired("kv_events_drop=0.3")
    assert arrived == sorted(arrived)
    assert len(arrived) == 40 - counts["kv_events_drop"] < 40


def test_swapped_events_come_after_the_next():
    _, arrived, counts = wired("kv_events_swap=0.4")
    late = [number for number, after in pairwise(arrived) if after < number]
    assert len(late) >= counts["kv_events_swap"] - 1 > 3
    assert sorted(arrived) == list(range(len(arrived)))


def test_late_events_keep_their_order():
    at_once, arrived, _ = wired("kv_events_delay=0.5:1ms..20ms", num_awaited=40)
    assert len(at_once) < 40
    assert arrived == list(range(40))


def test_once_closed_nothing_comes_any_more():
    at_once, arrived, _ = wired("kv_events_delay=1h")
    assert at_once == arrived == []
