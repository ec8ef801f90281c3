"""Leases, rooms and notices: the pure parts of handing KV over."""

import pytest

from serving.engines.kv.leases import Leases
from serving.engines.kv.notices import Left, Offered, decode, encode
from serving.engines.kv.params import RemoteKv, parse
from serving.engines.kv.rooms import Rooms
from serving.runtime.messages import CallError
from serving.transfer.agent import MAX_NOTICE_BYTES

READER = {"transport": "shm"}


LARGEST = RemoteKv(
    remote_engine_id="e" * 64,
    remote_request_id="r" * 64,
    remote_block_ids=[1 << 62],
    remote_ticket_number=1 << 62,
    remote_num_tokens=1 << 62,
    remote_num_blocks=1 << 62,
    remote_prefill_cached_tokens=1 << 62,
    remote_block_bytes=1e300,
    remote_num_gpus=1 << 62,
    remote_lease_s=30.0,
    remote_agent={},
)


def test_a_lease_runs_out_unless_it_is_renewed():
    leases = Leases(30.0)
    leases.grant("a", 0.0)
    leases.grant("b", 1.0)
    leases.renew("a", 5.0)  # to 25 s, which is earlier
    assert (leases.next_s(), leases.expire(29.0)) == (30.0, [])
    leases.renew("a", 20.0)
    assert (leases.next_s(), leases.expire(31.0)) == (31.0, ["b"])
    assert (leases.expire(39.9), leases.expire(40.0), leases.next_s()) == ([], ["a"], None)


def test_a_lease_that_has_ended_is_not_renewed():
    leases = Leases(30.0)
    leases.grant("a", 0.0)
    leases.end("a")
    leases.renew("a", 1.0)
    assert leases.next_s() is None


def test_a_call_and_its_reader_meet_whoever_comes_first():
    rooms = Rooms(10.0)
    assert rooms.come(1, "call", 0.0) is False
    assert rooms.begin(1, READER, 1.0) == "call"
    assert rooms.begin(2, READER, 0.0) is None
    assert rooms.come(2, "other", 1.0) is True
    assert (rooms.next_s(), rooms.expire(100.0), len(rooms)) == (None, [], 2)
    assert (rooms.reader(2), rooms.reader(3)) == (READER, None)


def test_who_waits_in_vain_leaves():
    rooms = Rooms(10.0)
    rooms.come(1, "call", 0.0)
    rooms.begin(2, READER, 5.0)
    assert (rooms.next_s(), [room.call for room in rooms.expire(12.0)]) == (10.0, ["call"])
    assert [room.reader for room in rooms.expire(15.0)] == [READER]


def test_a_room_is_used_once():
    rooms = Rooms(10.0)
    rooms.come(1, "call", 0.0)
    with pytest.raises(CallError, match="another request is in bootstrap_room 1"):
        rooms.come(1, "other", 0.0)
    assert rooms.leave(1).call == "call"
    assert rooms.leave(1) is None
    for enter in (rooms.come, rooms.begin):
        with pytest.raises(CallError, match="the other side has left bootstrap_room 1"):
            enter(1, READER, 0.0)


def test_there_are_so_many_rooms_at_most():
    rooms = Rooms(10.0, max_rooms=2)
    rooms.come(1, "call", 0.0)
    rooms.begin(2, READER, 0.0)
    with pytest.raises(CallError, match=r"all 2 rooms .* --transfer-meeting-timeout-s") as full:
        rooms.come(3, "call", 0.0)
    assert full.value.kind == "overloaded"


def test_the_largest_offer_fits_a_notice():
    said = Offered((1 << 63) - 1, LARGEST)
    assert len(encode(said)) <= MAX_NOTICE_BYTES
    assert decode(encode(said)) == said


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x90",
        encode(["left"]),
        encode(["left", -1]),
        encode(["left", 1, "x" * 501]),
        encode(["what", 1]),
        b"\x92\xa4read\xa1\xff",  # no text
    ],
)
def test_a_notice_that_says_nothing_we_know_is_none(data):
    assert decode(data) is None
    assert decode(encode(Left(1, "why"))) == Left(1, "why")


def test_what_asks_for_nothing_is_answered_by_one_worker():
    for params in (None, {}, {"do_remote_decode": False, "do_remote_prefill": None}, {"x": 1}):
        assert parse(params) is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"do_remote_decode": True, "bootstrap_room": -1}, "Expected `int` >= 0"),
        ({"do_remote_decode": True, "bootstrap_room": 1 << 63}, "bootstrap_room"),
        ({"do_remote_prefill": True, "bootstrap_room": 1, "bootstrap_agent": 3}, "Expected `object`"),
        ({"do_remote_prefill": True}, "missing required field `remote_engine_id`"),
    ],
)
def test_parameters_that_make_no_sense_are_refused(params, message):
    with pytest.raises(ValueError, match=message):
        parse(params)
