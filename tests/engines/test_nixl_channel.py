"""The side channel at which one instance asks another where KV is: who gets an answer, and what is said to the others."""

import asyncio
import contextlib
import socket

import pytest

from serving.engines.kv.params import RemoteKv, WantedKv
from serving.engines.mock.kv import nixl_peer
from serving.engines.mock.kv.nixl_channel import SideChannel
from serving.engines.mock.kv.nixl_peer import KvHandoverConfig, NixlPeer, peers_of
from serving.transfer.agent import TransferError
from serving.worker.protocol import PreprocessedRequest, StopConditions

SECRET = "a secret that both know"
KV = RemoteKv(
    remote_engine_id="e",
    remote_request_id="r",
    remote_block_ids=[0],
    remote_ticket_number=1,
    remote_num_tokens=3,
    remote_prefill_cached_tokens=0,
    remote_num_blocks=1,
    remote_block_bytes=64,
    remote_num_gpus=1,
    remote_lease_s=None,
    remote_agent={},
)


def peer(secret="", port=0, host="127.0.0.1"):
    return NixlPeer("kv_both", "me", host, port, secret)


@contextlib.asynccontextmanager
async def channel(secret="", find={"there": KV}.get):
    made = SideChannel(peer(secret), find)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


def wanted(port, request_id="there", engine_id="me", host="127.0.0.1"):
    return WantedKv(engine_id, request_id, host, port, [[1]])


def refusal(owner="", reader="", **asked):
    """Return why a reader with a secret gets no answer from an owner with another."""

    async def talk():
        async with channel(owner) as there, channel(reader) as here:
            with pytest.raises(TransferError) as caught:
                await here.ask(wanted(there.port, **asked))
            return str(caught.value)

    return asyncio.run(talk())


@pytest.mark.parametrize("secret", ["", SECRET])
def test_it_says_where_the_kv_of_a_request_is_again_and_again_on_few_connections(secret):
    async def talk():
        async with channel(secret) as there, channel(secret) as here:
            found = await asyncio.gather(*(here.ask(wanted(there.port)) for _ in range(40)))
            assert found == [KV] * 40

    asyncio.run(talk())


def test_kv_that_is_not_here_is_nowhere():
    assert "was read, or its lease has expired" in refusal(request_id="gone")


def test_the_wrong_engine_says_who_it_is():
    assert refusal(engine_id="you") == "engine you is not here; this is engine me"


def test_who_does_not_know_the_secret_gets_nothing():
    assert "expected DYNABENCH_KV_SECRET" in refusal(owner=SECRET)
    assert "another token" in refusal(owner=SECRET, reader="a secret of somebody else")
    assert refusal(reader=SECRET)


def test_kv_on_another_host_needs_a_secret():
    assert "is on another host; expected DYNABENCH_KV_SECRET" in refusal(host="10.1.2.3")


def test_what_is_no_side_channel_is_told_apart():
    async def talk():
        async def chat(reader, writer):
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            await writer.drain()
            writer.close()

        server = await asyncio.start_server(chat, "127.0.0.1", 0)
        async with server, channel() as here:
            with pytest.raises(TransferError, match="no stand-in answers there"):
                await here.ask(wanted(server.sockets[0].getsockname()[1]))

    asyncio.run(talk())


def test_noise_ends_one_connection_and_nothing_else():
    async def talk():
        async with channel() as there, channel() as here:
            for noise in (b"", b"x" * 15, b"x" * 16 + b"\xff\xff\xff\xff", b"x" * 16 + b"\x01\x00\x00\x00x"):
                _, writer = await asyncio.open_connection("127.0.0.1", there.port)
                writer.write(noise)
                await writer.drain()
                writer.close()
            assert await here.ask(wanted(there.port)) == KV

    asyncio.run(talk())


def test_a_port_in_use_is_named_with_the_way_out():
    async def talk(port):
        made = SideChannel(peer(port=port), {}.get)
        try:
            with pytest.raises(TransferError, match=rf"127.0.0.1:{port}.*VLLM_NIXL_SIDE_CHANNEL_PORT"):
                await made.open()
        finally:
            await made.close()

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(talk(taken.getsockname()[1]))


def test_an_address_that_others_reach_needs_a_secret_that_is_long_enough(monkeypatch):
    with pytest.raises(ValueError, match=r"VLLM_NIXL_SIDE_CHANNEL_HOST is 10.0.0.5.*expected DYNABENCH_KV_SECRET"):
        KvHandoverConfig(side_channel_host="10.0.0.5")
    monkeypatch.setenv(nixl_peer.SECRET, "short")
    with pytest.raises(ValueError, match="has 5 bytes; expected at least 16"):
        KvHandoverConfig()
    monkeypatch.setenv(nixl_peer.SECRET, SECRET)
    config = KvHandoverConfig(side_channel_host="10.0.0.5")
    assert SECRET not in repr(config)
    assert [each.secret for each in peers_of(config, num_ranks=1, first=0, size=1, tp_size=1)] == [SECRET]


def test_the_number_of_a_rank_is_in_its_name_and_port_if_there_are_several():
    config = KvHandoverConfig(engine_id="me", side_channel_port=5600)
    several = peers_of(config, num_ranks=2, first=2, size=4, tp_size=8)
    assert [(each.engine_id, each.port, each.tp_size) for each in several] == [("me_dp2", 5602, 8), ("me_dp3", 5603, 8)]
    (alone,) = peers_of(config, num_ranks=1, first=0, size=1, tp_size=1)
    assert (alone.engine_id, alone.port) == ("me", 5600)


def asked(params):
    return PreprocessedRequest(token_ids=b"", stop_conditions=StopConditions(), kv_transfer_params=params)


def test_cached_tokens_count_only_if_they_are_a_number():
    params = {"do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": "r", "remote_host": "h",
              "remote_port": 1, "remote_block_ids": [[1]], "something": "else"}  # fmt: skip
    found = [
        nixl_peer.part_of(asked(params | {"remote_prefill_cached_tokens": each})).wanted.num_cached_tokens
        for each in (7, None, "7")
    ]
    assert found == [7, None, None]
