"""KV that one mocker computes and another reads: the answers, the faults, and that nothing is left."""

import asyncio
import random

import pytest

from dynabench.virtual.clock import Clock
from mocker.timing.kv_size import KvSize
from serving.engines.kv.leases import RENEWALS
from serving.engines.kv.notices import Read, Renew, Wait, decode
from serving.engines.kv.params import RemoteKv
from serving.engines.kv.tickets import MAX_TICKETS
from serving.engines.mock.kv.passage import KvShape, Passage
from serving.transfer.agent import TransferError
from serving.transfer.config import TransferRunConfig
from tests.engines.kv_world import BLOCK, FIRST, expected, with_pair
from tests.support.waiting import until_async
from tests.transfer.world import KINDS

LONG = list(range(1, 60))


class Wrapped:
    """An agent of which some things go wrong."""

    def __init__(self, agent, *, read=None, notify=None):
        self._agent = agent
        self._read, self._notify = read, notify

    def __getattr__(self, name):
        return getattr(self._agent, name)

    async def read(self, owner, pieces, **more):
        if self._read is not None:
            await self._read()
        await self._agent.read(owner, pieces, **more)

    async def notify(self, owner, notice, **more):
        if self._notify is None or self._notify(notice):
            await self._agent.notify(owner, notice, **more)


# Answers


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_decoded_elsewhere_is_that_of_one_worker(kind):
    async def talk(pair):
        for prompt in (LONG, LONG[:8], LONG[:1], LONG):
            call = await pair.answer(prompt, 9, await pair.kv(prompt)).over()
            assert call.end.error == ""
            assert call.tokens == expected(prompt, 9)
            assert call.items[-1]["finish_reason"] == "length"
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 0
        assert pair.decode.exchange.counts.num_read == 4

    with_pair(talk, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_both_workers_of_a_request_may_be_called_at_once(kind):
    async def talk(pair):
        for prompt in (LONG, LONG[:8], LONG[:1], LONG):
            decode, prefill = pair.meet(prompt, 9)
            assert (await decode.over()).end.error == (await prefill.over()).end.error == ""
            assert decode.tokens == expected(prompt, 9)
        await pair.at_rest()

    with_pair(talk, kind)


def test_a_first_token_that_comes_with_the_kv_may_be_the_only_one():
    async def talk(pair):
        decode, prefill = pair.meet(LONG, 1)
        assert (await decode.over()).tokens == expected(LONG, 1)
        assert decode.said("finish_reason") == "length"
        await prefill.over()
        await pair.at_rest()

    with_pair(talk)


def test_log_probabilities_are_those_of_one_worker():
    async def talk(pair):
        options = {"seed": 7, "logprobs": 2, "prompt_logprobs": 1}
        whole = await pair.ask(pair.decode, LONG, 5, sampling_options=options).over()
        for call in (
            pair.answer(LONG, 5, await pair.kv(LONG), sampling_options=options),
            pair.meet(LONG, 5, sampling_options=options)[0],
        ):
            await call.over()
            for name in ("log_probs", "top_logprobs", "prompt_log_probs"):
                assert [item.get(name) for item in call.items] == [item.get(name) for item in whole.items]

    with_pair(talk)


def test_an_answer_ends_where_it_would_at_one_worker():
    async def talk(pair):
        whole = expected(LONG, 9)
        stop = next(token for token in whole[1:] if token != whole[0])
        first = await pair.ask(pair.prefill, LONG, kv_transfer_params=FIRST, stop_token_ids=[whole[0]]).over()
        call = await pair.answer(LONG, 9, first.said("kv_transfer_params"), stop_token_ids=[stop]).over()
        assert call.tokens == whole[: whole.index(stop) + 1]
        assert call.said("finish_reason") == "stop"
        await pair.at_rest()

    with_pair(talk)


def test_only_blocks_that_the_decode_worker_lacks_are_read():
    async def talk(pair):
        await pair.answer(LONG, 2, await pair.kv(LONG)).over()
        longer = [*LONG, *range(100, 120)]
        call = await pair.answer(longer, 2, await pair.kv(longer)).over()
        block = pair.decode.shape.size.block
        assert call.said("times")["transfer_bytes"] == block * (-(-len(longer) // BLOCK) - len(LONG) // BLOCK)
        assert call.said("cached_tokens") == len(LONG) // BLOCK * BLOCK  # as the prefill worker had them

    with_pair(talk)


def test_each_worker_says_when_what_happened():
    async def talk(pair):
        first = await pair.ask(pair.prefill, LONG, kv_transfer_params=FIRST).over()
        times = first.said("times")
        assert 0 <= times["admitted"] < times["prefill_end"]
        call = await pair.answer(LONG, 3, first.said("kv_transfer_params")).over()
        order = ("decode_blocks", "transfer_start", "transfer_end", "decode_start")
        found = [call.said("times")[name] for name in order]
        assert found == sorted(found)
        assert found[0] >= 0

    with_pair(talk)


def test_a_decode_worker_takes_whole_requests_too():
    async def talk(pair):
        call = await pair.ask(pair.decode, LONG, 5).over()
        assert call.tokens == expected(LONG, 5)
        assert call.said("times").keys() == {"admitted", "prefill_end"}
        call = await pair.ask(pair.prefill, LONG, 5, kv_transfer_params={"do_remote_decode": False}).over()
        assert call.tokens == expected(LONG, 5)

    with_pair(talk)


# What makes no sense


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"remote_num_tokens": 5}, "KV of 5 tokens for a prompt of 59"),
        ({"remote_num_blocks": 1}, "KV in 1 blocks for a prompt of 15"),
        ({"remote_block_bytes": 8}, "KV blocks of 8 bytes"),
        ({"remote_block_ids": "all"}, "Expected `array`, got `str`"),
        ({"remote_request_id": ""}, "length >= 1"),
        ({"do_remote_decode": True}, "expected one of them"),
    ],
)
def test_kv_that_is_not_the_prompts_is_refused(change, message):
    async def talk(pair):
        kv = await pair.kv(LONG)
        call = await pair.answer(LONG, 3, kv | change).over()
        assert call.end.kind == "invalid"
        assert message in call.end.error
        assert (await pair.answer(LONG, 3, kv).over()).tokens == expected(LONG, 3)
        await pair.at_rest()

    with_pair(talk)


def test_a_worker_refuses_the_other_ones_part():
    async def talk(pair):
        wrong = await pair.ask(pair.decode, LONG, kv_transfer_params=FIRST).over()
        assert (wrong.end.kind, "--role decode" in wrong.end.error) == ("invalid", True)
        wrong = await pair.ask(pair.prefill, LONG, kv_transfer_params=await pair.kv(LONG)).over()
        assert (wrong.end.kind, "--role prefill" in wrong.end.error) == ("invalid", True)

    with_pair(talk)


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_a_prompt_that_fits_no_cache_is_refused(flow):
    async def talk(pair):
        prompt = list(range(1, 100))
        if flow == "source-first":
            call = await pair.answer(prompt, 3, await pair.kv(prompt)).over()
        else:
            call, first = pair.meet(prompt, 3)
            assert (await first.over()).end.kind == "engine"
        assert ((await call.over()).end.kind, "KV blocks" in call.end.error) == ("invalid", True)
        await pair.at_rest()

    with_pair(talk, decode={"num_gpu_blocks": 20})


# KV that is not kept any more


async def get_read(pair, kv):
    """Let the owner believe that KV was read."""
    await pair.decode.exchange.ask(kv["remote_agent"], Read(kv["remote_request_id"]))
    await until_async(lambda: not pair.prefill.handover.transfers().num_held)


@pytest.mark.parametrize("fault", ["gone", "recycled", "mixed up"])
@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_kv_that_is_not_kept_or_is_another_prompts_is_not_taken(fault, policy):
    async def talk(pair):
        prompt, kv = LONG, await pair.kv(LONG)
        if fault == "mixed up":
            prompt = [*LONG[:-1], 99]
        else:
            await get_read(pair, kv)
        if fault == "recycled":
            await pair.kv(list(range(200, 259)))
        call = await pair.answer(prompt, 5, kv).over()
        if policy == "recompute":
            assert call.tokens == expected(prompt, 5)
        else:
            said = {
                "gone": "it is not there any more",
                "recycled": "that of another prompt has taken its place",
                "mixed up": "it is that of another prompt",
            }
            assert (call.end.kind, call.tokens) == ("engine", [])
            assert said[fault] in call.end.error
        assert pair.decode.exchange.counts.num_failed == 1
        await until_async(lambda: pair.decode.is_full)

    with_pair(talk, decode={"kv_load_failure_policy": policy})


class Damaging(Wrapped):
    """An agent in whose first reads a bit is wrong."""

    def __init__(self, agent, num_reads):
        super().__init__(agent)
        self._num_left = num_reads

    async def read(self, owner, pieces, **more):
        await super().read(owner, pieces, **more)
        if self._num_left:
            self._num_left -= 1
            self._agent.memory[pieces[0].target] ^= 1


@pytest.mark.parametrize(("num_damaged", "num_failed"), [(1, 0), (2, 1)])
def test_a_ticket_of_which_a_bit_is_wrong_is_read_again(num_damaged, num_failed):
    async def talk(pair):
        kv = await pair.kv(LONG)
        pair.decode.exchange.agent = Damaging(pair.decode.exchange.agent, num_damaged)
        call = await pair.answer(LONG, 5, kv).over()
        assert call.tokens == expected(LONG, 5)
        assert pair.decode.exchange.counts.num_failed == num_failed
        await pair.at_rest()

    with_pair(talk, decode={"kv_load_failure_policy": "recompute"})


def test_kv_whose_lease_runs_out_on_its_way_does_not_arrive():
    async def talk(pair):
        call = await pair.answer(LONG, 5, await pair.kv(LONG)).over()
        assert (call.end.kind, "it is not there any more" in call.end.error) == ("engine", True)
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 1

    lease = {"kv_lease_duration_s": 0.1, "kv_lease_renewal": False}
    with_pair(talk, lease=lease, transfer_latency_ms=2000.0)


# How long it takes


def test_a_transfer_takes_its_latency_and_its_bytes_and_says_so():
    async def talk(pair):
        call = await pair.answer(LONG, 3, await pair.kv(LONG)).over()
        times = call.said("times")
        num_bytes = 15 * pair.decode.shape.size.block
        assert times["transfer_bytes"] == pair.decode.exchange.counts.num_bytes == num_bytes
        assert times["transfer_end"] - times["transfer_start"] >= 0.05 + num_bytes / 1e8

    with_pair(talk, transfer_bandwidth_gb_s=0.1, transfer_latency_ms=50.0)


def test_a_request_that_is_given_up_on_its_kvs_way_frees_both_workers_at_once():
    async def talk(pair):
        call = pair.answer(LONG, 3, await pair.kv(LONG))
        await until_async(lambda: pair.decode.handover.transfers().num_loading)
        call.stream.cancel()
        await pair.at_rest()
        assert (pair.decode.exchange.counts.num_read, pair.prefill.exchange.counts.num_expired) == (0, 0)

    with_pair(talk, transfer_latency_ms=1e9)


def test_transfers_share_the_links_of_the_worker_that_they_come_to_and_of_the_one_that_they_come_from():
    """One block is 1 GB: a link moves one in a second."""
    size = KvSize(num_layers=1, block=1e9)
    kv = {who: remote_kv(who) for who in ("one", "other")}

    async def seconds(*moves):
        clock = Clock()
        passage = Passage(
            KvShape(size, 1), TransferRunConfig(transfer_bandwidth_gb_s=1.0, transfer_latency_ms=0), clock
        )
        moving = [asyncio.ensure_future(passage.move(kv[who], 3, rank)) for who, rank in moves]
        await asyncio.sleep(0)
        while clock.peek() < float("inf"):
            clock.step()
        await asyncio.gather(*moving)
        return clock.now

    assert asyncio.run(seconds(("one", 0))) == 3
    assert asyncio.run(seconds(("one", 0), ("other", 0))) == 6
    assert asyncio.run(seconds(("one", 0), ("one", 1))) == 6
    assert asyncio.run(seconds(("one", 0), ("other", 1))) == 3


def remote_kv(who):
    return RemoteKv(
        remote_engine_id=who,
        remote_request_id="r",
        remote_block_ids=[0],
        remote_ticket_number=1,
        remote_num_tokens=1,
        remote_num_blocks=1,
        remote_prefill_cached_tokens=0,
        remote_block_bytes=1e9,
        remote_num_gpus=1,
        remote_lease_s=None,
        remote_agent={},
    )


# Faults of workers


@pytest.mark.parametrize("kind", KINDS)
def test_an_owner_that_is_gone_is_noticed(kind):
    async def talk(pair):
        kv = await pair.kv(LONG)
        pair.decode.exchange.agent = Wrapped(pair.decode.exchange.agent, read=pair.prefill.close)
        call = await pair.answer(LONG, 5, kv).over()
        assert (call.end.kind, call.tokens) == ("lost", [])
        await until_async(lambda: pair.decode.is_full)

    with_pair(talk, kind)


def test_a_read_that_takes_too_long_fails():
    async def late():
        raise TransferError("not done after 30 s", "late")

    async def talk(pair):
        kv = await pair.kv(LONG)
        pair.decode.exchange.agent = Wrapped(pair.decode.exchange.agent, read=late)
        call = await pair.answer(LONG, 5, kv).over()
        assert (call.end.kind, "not done after 30 s" in call.end.error) == ("lost", True)
        await pair.at_rest()

    with_pair(talk)


def test_kv_that_nobody_reads_is_free_when_its_lease_has_run_out():
    async def talk(pair):
        kv = await pair.kv(LONG)
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 1
        call = await pair.answer(LONG, 5, kv).over()
        assert call.end.kind == "engine"
        await pair.at_rest()

    with_pair(talk, lease={"kv_lease_duration_s": 0.05})


@pytest.mark.parametrize("is_read", [True, False])
def test_a_call_that_is_held_lasts_as_long_as_its_kv(is_read):
    async def talk(pair):
        first = pair.ask(pair.prefill, LONG, kv_transfer_params=FIRST, is_held=True)
        await until_async(lambda: first.said("kv_transfer_params"))
        assert (first.end, pair.prefill.handover.transfers().num_held) == (None, 1)
        if is_read:
            call = pair.answer(LONG, 5, first.said("kv_transfer_params"))
            assert (await call.over()).tokens == expected(LONG, 5)
            assert (await first.over()).end.error == ""
        else:
            first.stream.cancel()
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 0

    with_pair(talk, lease={"kv_lease_duration_s": 1e6})


def test_a_notice_that_is_lost_costs_a_lease():
    async def talk(pair):
        pair.decode.exchange.agent = Wrapped(
            pair.decode.exchange.agent, notify=lambda notice: not isinstance(decode(notice), Read)
        )
        call = await pair.answer(LONG, 5, await pair.kv(LONG)).over()
        assert call.tokens == expected(LONG, 5)
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 1

    with_pair(talk, lease={"kv_lease_duration_s": 3.0})


def test_the_leases_of_requests_that_wait_for_blocks_are_renewed():
    async def talk(pair):
        kv = await pair.kv(LONG)
        blocker = pair.ask(pair.decode, LONG[:40], 10_000)
        call = pair.answer(LONG, 5, kv)
        await until_async(lambda: Renew([kv["remote_request_id"]]) in pair.prefill.notices)
        assert call.items == []
        blocker.stream.cancel()
        assert (await call.over()).tokens == expected(LONG, 5)
        await pair.at_rest()

    with_pair(
        talk,
        lease={"kv_lease_duration_s": 6.0},
        decode={"num_gpu_blocks": 2600, "max_num_seqs": 1},
    )


def test_notices_that_come_twice_change_nothing():
    async def talk(pair):
        agent = pair.decode.exchange.agent

        class Twice(Wrapped):
            async def notify(self, owner, notice, **more):
                await agent.notify(owner, notice, **more)
                await agent.notify(owner, notice, **more)

        pair.decode.exchange.agent = Twice(agent)
        for _ in range(3):
            decode, prefill = pair.meet(LONG, 5)
            assert (await decode.over()).tokens == expected(LONG, 5)
            await prefill.over()
            assert (await pair.answer(LONG, 5, await pair.kv(LONG)).over()).tokens == expected(LONG, 5)
        await pair.at_rest()

    with_pair(talk)


# Room


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_more_requests_than_fit_take_turns(flow):
    prompts = [list(range(100 * n, 100 * n + 59)) for n in range(8)]

    async def source_first(pair, prompt):
        return await pair.answer(prompt, 9, await pair.kv(prompt)).over()

    async def talk(pair):
        if flow == "source-first":
            calls = await asyncio.gather(*(source_first(pair, prompt) for prompt in prompts))
        else:
            calls = [pair.meet(prompt, 9)[0] for prompt in prompts]
        for prompt, call in zip(prompts, calls, strict=True):
            assert (await call.over()).tokens == expected(prompt, 9)
        await pair.at_rest()

    # Of these prompts, of 15 blocks, the prefill worker's cache holds 4, and the decode worker's 1.
    with_pair(talk, prefill={"num_gpu_blocks": 64}, decode={"num_gpu_blocks": 20})


# Rooms


def test_a_room_in_which_nobody_comes_ends_the_call():
    async def talk(pair):
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}
        prefill = pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})
        params["bootstrap_room"] = 6
        decode = pair.ask(pair.decode, LONG, 3, kv_transfer_params=params | {"do_remote_prefill": True})
        assert ((await prefill.over()).end.kind, (await decode.over()).end.kind) == ("engine", "engine")
        await pair.at_rest()

    with_pair(talk, transfer_meeting_timeout_s=0.5)


def test_who_waits_in_a_room_counts_as_waiting_for_the_other_worker():
    async def talk(pair):
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}
        prefill = pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})
        params["bootstrap_room"] = 6
        decode = pair.ask(pair.decode, LONG, 3, kv_transfer_params=params | {"do_remote_prefill": True})
        await until_async(lambda: pair.prefill.notices)
        for worker in (pair.prefill, pair.decode):
            transfers = worker.handover.transfers()
            assert (transfers.num_held, transfers.num_waiting, transfers.num_loading) == (0, 1, 0)
        prefill.stream.cancel()
        decode.stream.cancel()
        await pair.at_rest()

    with_pair(talk)


@pytest.mark.parametrize("busy", ["prefill", "decode"])
def test_who_waits_in_a_room_does_so_as_long_as_the_request_is_queued_at_the_other_worker(busy):
    async def talk(pair):
        worker, other = (pair.prefill, pair.decode) if busy == "prefill" else (pair.decode, pair.prefill)
        blocker = pair.ask(worker, LONG[:40], 10_000)
        decode, prefill = pair.meet(LONG, 5)
        await until_async(lambda: decode.end or prefill.end or other.notices.count(Wait([1])) == RENEWALS + 2)
        assert (decode.end, prefill.end) == (None, None)
        blocker.stream.cancel()
        assert (await decode.over()).tokens == expected(LONG, 5)
        await prefill.over()
        await pair.at_rest()

    one = {"num_gpu_blocks": 2600, "max_num_seqs": 1}
    with_pair(talk, prefill=one, decode=one, transfer_meeting_timeout_s=1.5)


def test_where_all_rooms_are_taken_both_calls_may_go_elsewhere():
    async def talk(pair):
        pair.prefill.handover._prefill.owner._rooms._max_rooms = 1
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}
        taken = pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})
        for call in pair.meet(LONG, 3):
            end = (await call.over()).end
            assert (end.kind, "all 1 rooms of this prefill worker are taken" in end.error) == ("overloaded", True)
        taken.stream.cancel()
        assert (await pair.meet(LONG, 3)[0].over()).tokens == expected(LONG, 3)
        await pair.at_rest()

    with_pair(talk)


@pytest.mark.parametrize("leaver", ["prefill", "decode"])
@pytest.mark.parametrize("is_first", [True, False])
def test_who_leaves_a_room_ends_the_call_of_the_other(leaver, is_first):
    async def talk(pair):
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}

        def prefill():
            return pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})

        def decode():
            return pair.ask(pair.decode, LONG, 3, kv_transfer_params=params | {"do_remote_prefill": True})

        leave, stay = (prefill, decode) if leaver == "prefill" else (decode, prefill)
        if is_first:
            leave().stream.cancel()
            if leaver == "decode":
                await until_async(lambda: pair.prefill.notices)
            left = stay()
        else:
            left = stay()
            leave().stream.cancel()
        assert (await left.over()).end.error
        await pair.at_rest()

    with_pair(talk)


@pytest.mark.parametrize("kind", ["lost", "refused"])
def test_a_decode_worker_that_cannot_be_told_where_the_kv_is_ends_the_prefill_call_at_once(kind):
    def lost(notice):
        raise TransferError("nobody is there", kind)

    async def talk(pair):
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}
        pair.prefill.exchange.agent = Wrapped(pair.prefill.exchange.agent, notify=lost)
        prefill = pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})
        decode = pair.ask(pair.decode, LONG, 3, kv_transfer_params=params | {"do_remote_prefill": True})
        call = await prefill.over()
        assert call.end.kind == "engine"
        assert "the decode worker cannot be notified of the KV: nobody is there" in call.end.error
        decode.stream.cancel()
        await pair.at_rest()

    with_pair(talk)


def test_a_call_whose_reader_hears_too_late_of_its_kv_ends_with_the_lease():
    async def slow(pieces):
        await asyncio.Event().wait()

    async def talk(pair):
        params = pair.prefill.handover.bootstrap.params | {"bootstrap_room": 5}
        agent = pair.prefill.exchange.agent = Wrapped(pair.prefill.exchange.agent)
        agent.notify = lambda owner, notice, **more: slow(notice)
        prefill = pair.ask(pair.prefill, LONG, kv_transfer_params=params | {"do_remote_decode": True})
        decode = pair.ask(pair.decode, LONG, 3, kv_transfer_params=params | {"do_remote_prefill": True})
        assert "its lease expired" in (await prefill.over()).end.error
        decode.stream.cancel()
        await pair.at_rest()

    with_pair(talk, lease={"kv_lease_duration_s": 0.1, "kv_lease_renewal": False})


@pytest.mark.parametrize("num_steps", range(6))
def test_a_prompt_that_is_given_up_while_its_last_chunk_is_ahead_leaves_nothing(num_steps):
    """Asynchronously the batch of its last chunk is closed a step before."""

    async def talk(pair):
        core = pair.prefill.mocker.engine._core
        begun = core.iteration
        calls = [
            pair.ask(pair.prefill, list(range(first, first + 40)), kv_transfer_params=FIRST) for first in (0, 50, 100)
        ]
        await until_async(lambda: core.iteration >= begun + num_steps or calls[-1].end)
        for call in calls:
            call.stream.cancel()
        await pair.at_rest()
        assert pair.prefill.handover._prefill.owner._tickets.num_free == MAX_TICKETS

    lease = {"kv_lease_duration_s": 0.2, "kv_lease_renewal": False}  # of those that were computed by then
    with_pair(talk, prefill={"max_num_batched_tokens": 16, "max_num_seqs": 16}, lease=lease)


# Everything at once


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_aborts_at_random_phases_leave_nothing(flow, seed):
    rng = random.Random(seed)

    async def one(pair, number):
        prompt = [number % 7, *range(rng.randint(0, 60))]
        length = rng.randint(1, 20)
        will_abort = rng.random() < 0.5
        await asyncio.sleep(rng.random() * 0.2)
        calls = []
        if flow == "destination-first":
            calls = list(pair.meet(prompt, length))
        else:
            calls.append(pair.ask(pair.prefill, prompt, kv_transfer_params=FIRST))
        if will_abort:
            await asyncio.sleep(rng.random() * 0.05)
            calls[0].stream.cancel()
        for call in calls:
            await call.over()
        if flow == "source-first" and (kv := calls[0].said("kv_transfer_params")) is not None and calls[0].end:
            will_abort = rng.random() < 0.5
            calls[0] = pair.answer(prompt, length, kv)
            if will_abort:
                await asyncio.sleep(rng.random() * 0.05)
                calls[0].stream.cancel()
            await calls[0].over()
        if not will_abort:
            assert calls[0].end.error == ""
            assert calls[0].tokens == expected(prompt, length)

    async def talk(pair):
        await asyncio.gather(*(one(pair, number) for number in range(60)))
        await pair.at_rest()
        assert pair.prefill.exchange.counts.num_expired == 0

    with_pair(talk, prefill={"num_gpu_blocks": 64}, decode={"num_gpu_blocks": 50})


# What an attacker found


def test_leases_that_end_at_once_lose_no_offer():
    """A timer of uvloop that is due at once does not say when: offers under such leases were never told."""

    async def talk(pair):
        for number in range(20):
            calls = [pair.ask(pair.prefill, [number, *LONG[:more]], kv_transfer_params=FIRST) for more in range(5, 15)]
            for call in calls:
                await call.over()
        await pair.at_rest()

    with_pair(talk, lease={"kv_lease_duration_s": 1e-6})


def test_an_owner_that_hangs_does_not_hold_up_reads_from_others():
    async def talk(pair):
        never, begun = asyncio.Event(), asyncio.Event()
        agent = pair.decode.exchange.agent

        class Hanging(Wrapped):
            async def read(self, owner, pieces, **more):
                if owner.get("id") == "1" * 32:
                    begun.set()
                    await never.wait()
                    raise TransferError("it hung", "late")
                await agent.read(owner, pieces, **more)

        kv = await pair.kv(LONG)
        hung = kv | {"remote_engine_id": "hung", "remote_agent": kv["remote_agent"] | {"id": "1" * 32}}
        pair.decode.exchange.agent = Hanging(agent)
        stuck = [pair.answer([number, *LONG[1:]], 5, hung) for number in range(40)]
        await begun.wait()
        call = await pair.answer(LONG, 5, kv).over()
        assert call.tokens == expected(LONG, 5)
        never.set()
        for each in stuck:
            assert (await each.over()).end.kind == "lost"
        await pair.at_rest()

    with_pair(talk, decode={"num_gpu_blocks": 4000})
