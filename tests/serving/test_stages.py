"""Requests that two workers share: pools that come and go, both flows, and every way in which either side may end."""

import asyncio
import contextlib
import logging

import numpy as np
import pytest

from serving.frontend.api.errors import ApiError
from serving.model.errors import ModelError
from serving.router import RouterConfig
from serving.routing.service import RouterService, RouterServiceConfig
from serving.runtime.messages import CallError
from tests.support.handover import CACHED, answer, on_site, tokens_of
from tests.support.waiting import until_async

PROMPT = np.arange(10, 20, dtype=np.uint32)
SHORT = np.arange(3, dtype=np.uint32)


def expected(count=5, prompt=PROMPT):
    return answer(prompt.tolist(), count)


async def pair(site, **prefill):
    """Start a worker for each stage."""
    workers = await site.worker("prefill", **prefill), await site.worker("decode")
    await site.until_there(*workers)
    return workers


def only(items):
    [item] = items
    return item


# Source first


def test_a_prompt_is_computed_by_one_worker_and_answered_by_another(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        attempts = site.attempts(PROMPT, min_tokens=3, stop=["x"], stop_token_ids=[4], stop_after=9)
        assert site.num_booked()
        tokens, outputs = await tokens_of(attempts)
        assert (tokens, decode.num_local) == (expected(), 0)
        asked, answered = only(prefill.asked), only(decode.asked)
        stops = asked["stop_conditions"]
        assert (stops["max_tokens"], stops["min_tokens"], stops["ignore_eos"]) == (1, 0, True)
        assert not (stops["stop"] or stops["stop_token_ids"] or stops["stop_after"] or asked["eos_token_ids"])
        assert asked["token_ids"] == answered["token_ids"] == PROMPT.tolist()
        assert (answered["stop_conditions"]["stop"], answered["eos_token_ids"]) == (["x"], [2])
        assert {output.num_cached for output in outputs} == {CACHED}
        called = [call.placement.rank.instance_id for call in (attempts.prefill, attempts.decode)]
        assert called == [prefill.id, decode.id]
        stamps = attempts.stamps()
        assert set(stamps) == {
            *("prefill_queued", "admitted", "prefill_end", "decode_queued", "transfer_start", "transfer_end")
        }
        assert stamps["prefill_queued"] < stamps["admitted"] < stamps["prefill_end"]
        assert stamps["decode_queued"] < stamps["transfer_start"] < stamps["transfer_end"]
        assert attempts.hand_over_s >= 0

    on_site(tmp_path, talk)


def test_a_prompt_that_a_prefill_worker_has_answered_leaves_its_books(tmp_path):
    async def talk(site):
        _, decode = await pair(site)
        decode.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT)))
        await until_async(lambda: decode.asked)
        stages = site.model.stages
        (_, at_prefill), (_, at_decode) = only(stages.prefill.books()), only(stages.decode.books())
        assert (at_prefill.num_requests, at_prefill.prefill_tokens) == (0, 0)
        # What it comes for is decoding, with blocks for all of its prompt, which it does not have to compute.
        assert (at_decode.num_requests, at_decode.prefill_tokens, at_decode.decode_blocks) == (1, 0, 3)
        decode.gate.set()
        assert (await reading)[0] == expected()

    on_site(tmp_path, talk)


def test_log_probabilities_of_the_prompt_are_asked_of_who_computes_it(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        prefill.says = {"prompt_log_probs": [None, -0.5], "prompt_top_logprobs": [None, [[1, -0.5]]]}
        sampling = {"logprobs": 2, "prompt_logprobs": 1, "seed": 5}
        _, outputs = await tokens_of(site.attempts(PROMPT, sampling=sampling))
        assert only(prefill.asked)["sampling_options"] == {"prompt_logprobs": 1, "seed": 5}
        assert only(decode.asked)["sampling_options"] == {"logprobs": 2, "seed": 5}
        assert outputs[0].prompt_logprobs == [(None, None), (-0.5, [(1, -0.5)])]

    on_site(tmp_path, talk)


def test_a_prefill_worker_that_does_not_say_where_the_kv_is_is_named(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        prefill.says = {"kv_transfer_params": None}
        with pytest.raises(
            ApiError, match=f"prefill worker {prefill.id:x}: its answer does not say where the KV is"
        ) as failed:
            await tokens_of(site.attempts(PROMPT))
        assert (failed.value.status, decode.asked) == (500, [])

    on_site(tmp_path, talk)


@pytest.mark.parametrize("params", [[1], "here", {"x": "y" * 4_200_000}], ids=["list", "text", "large"])
def test_what_cannot_be_kv_transfer_params_travels_nowhere(tmp_path, params):
    async def talk(site):
        prefill, decode = await pair(site)
        prefill.says = {"kv_transfer_params": params}
        with pytest.raises(ApiError, match="kv_transfer_params"):
            await tokens_of(site.attempts(PROMPT))
        assert decode.asked == []

    on_site(tmp_path, talk)


def test_a_failed_prefill_is_the_requests_end_unless_decode_workers_may_compute_it(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        prefill.error = CallError("out of order", "engine")
        if not site.model.stages.config.prefill_fallback:
            with pytest.raises(ApiError, match="out of order"):
                await tokens_of(site.attempts(PROMPT))
            return
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert decode.num_local == 1

    on_site(tmp_path / "fails", talk)
    on_site(tmp_path / "falls back", talk, prefill_fallback=True)


@pytest.mark.parametrize("how", ["refused", "left"])
def test_kv_that_nobody_will_read_is_given_up_as_the_request_ends(tmp_path, how):
    async def talk(site):
        prefill, decode = await pair(site)
        decode.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT)))
        await until_async(lambda: decode.asked)
        assert (prefill.num_running, len(site.world.kv)) == (1, 1)
        if how == "refused":
            decode.error = CallError("no room", "engine")
            decode.gate.set()
        else:
            reading.cancel()
        with pytest.raises((ApiError, asyncio.CancelledError)):
            await reading
        await until_async(lambda: not prefill.num_running)

    on_site(tmp_path, talk)


def test_kv_that_is_gone_is_the_requests_end(tmp_path):
    async def talk(site):
        _, decode = await pair(site)
        decode.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT)))
        await until_async(lambda: decode.asked)
        site.world.kv.clear()  # its lease ran out
        decode.gate.set()
        with pytest.raises(ApiError, match="KV of None where that of"):
            await reading

    on_site(tmp_path, talk)


# Workers that are lost or leave


def test_a_lost_prefill_worker_is_replaced(tmp_path):
    async def talk(site):
        first, _ = await pair(site)
        first.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT, limit=1)))
        await until_async(lambda: first.asked)
        second = await site.worker("prefill")
        await site.until_there(second)
        await first.runtime.close()
        assert (await reading)[0] == expected()
        assert len(second.asked) == 1

    on_site(tmp_path, talk)


def test_a_decode_worker_lost_in_the_middle_is_replaced_after_another_prefill_with_what_was_said(tmp_path):
    async def talk(site):
        prefill, first = await pair(site)
        first.pause_after = 2
        first.gate.clear()
        attempts = site.attempts(PROMPT, limit=1)
        said = (await attempts.take()).tokens
        while len(said) < 2:
            said += (await attempts.take()).tokens
        second = await site.worker("decode")
        await site.until_there(second)
        await first.runtime.close()
        tokens, _ = await tokens_of(attempts)
        assert said + tokens == expected()
        again = prefill.asked[1]
        assert (again["token_ids"], again["num_generated"]) == (PROMPT.tolist() + said, 2)
        assert (only(second.asked)["num_generated"], second.num_local) == (2, 0)

    on_site(tmp_path, talk)


def test_a_decode_worker_that_is_about_to_leave_costs_no_second_prefill(tmp_path):
    async def talk(site):
        prefill, first = await pair(site)
        first.error = CallError("it takes no more work", "draining")
        second = await site.worker("decode")
        await site.until_there(second)
        for _ in range(2):
            assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert (len(prefill.asked), len(second.asked)) == (2, 2)

    on_site(tmp_path, talk)


@pytest.mark.parametrize("has_room", [False, True], ids=["source first", "destination first"])
@pytest.mark.parametrize("at", ["prefill", "decode"])
def test_a_client_that_leaves_ends_both_calls(tmp_path, has_room, at):
    async def talk(site):
        workers = dict(zip(("prefill", "decode"), await pair(site, has_room=has_room), strict=True))
        workers[at].gate.clear()
        attempts = site.attempts(PROMPT)
        reading = asyncio.create_task(tokens_of(attempts))
        await until_async(lambda: workers[at].num_running)
        reading.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await reading
        assert not site.num_booked()

    on_site(tmp_path, talk, flow="destination-first" if has_room else "source-first")


# Destination first


def test_both_workers_are_called_at_once_and_meet_in_a_room(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site, has_room=True)
        prefill.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT)))
        await until_async(lambda: prefill.asked and decode.asked)  # neither waits for the other's answer
        theirs, ours = only(prefill.asked)["kv_transfer_params"], only(decode.asked)["kv_transfer_params"]
        assert (theirs["do_remote_decode"], ours["do_remote_prefill"]) == (True, True)
        assert (theirs["do_remote_prefill"], ours["do_remote_decode"]) == (False, False)
        assert theirs["bootstrap_room"] == ours["bootstrap_room"]
        assert theirs["bootstrap_host"] == ours["bootstrap_host"] == f"host-{prefill.id}"
        prefill.gate.set()
        tokens, outputs = await reading
        assert (tokens, outputs[-1].num_cached) == (expected(), CACHED)

    on_site(tmp_path, talk, flow="destination-first")


def test_a_prefill_worker_without_a_room_goes_first_whatever_the_flow(tmp_path):
    async def talk(site):
        await pair(site)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()

    on_site(tmp_path, talk, flow="destination-first")


def test_a_prefill_worker_that_knows_nothing_else_is_called_at_once_whatever_the_flow(tmp_path):
    async def talk(site):
        prefill, _ = await pair(site, has_room=True)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert "bootstrap_room" not in only(prefill.asked)["kv_transfer_params"]
        eager = await site.worker("prefill", has_room=True, is_needed=True)
        await site.until_there(eager)
        await prefill.runtime.close()
        await until_async(lambda: site.model.stages.prefill.num_ranks == 1)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert "bootstrap_room" in only(eager.asked)["kv_transfer_params"]

    on_site(tmp_path, talk)


def test_what_is_said_of_the_prompt_comes_before_the_first_token(tmp_path):
    async def talk(site):
        prefill, _ = await pair(site, has_room=True)
        prefill.says = {"prompt_log_probs": [None], "prompt_top_logprobs": [None]}
        _, outputs = await tokens_of(site.attempts(PROMPT, sampling={"prompt_logprobs": 1}))
        assert outputs[0].prompt_logprobs == [(None, None)]

    on_site(tmp_path, talk, flow="destination-first")


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_when_one_of_two_fails_both_end(tmp_path, failing):
    async def talk(site):
        workers = dict(zip(("prefill", "decode"), await pair(site, has_room=True), strict=True))
        other = workers["decode" if failing == "prefill" else "prefill"]
        other.gate.clear()
        workers[failing].error = CallError("out of order", "engine")
        with pytest.raises(ApiError, match="out of order"):
            await tokens_of(site.attempts(PROMPT))
        await until_async(lambda: not other.num_running)

    on_site(tmp_path, talk, flow="destination-first")


@pytest.mark.parametrize("failing", ["prefill", "decode"])
def test_where_two_cannot_meet_for_want_of_room_others_are_asked_before_the_client_gets_429(tmp_path, failing):
    async def talk(site):
        first, decode = await pair(site, has_room=True)
        second = await site.worker("prefill", has_room=True)
        await site.until_there(second)
        for worker in (first, second) if failing == "prefill" else (decode,):
            worker.error = CallError("all rooms are taken", "overloaded")
        with pytest.raises(ApiError, match="all rooms are taken") as refused:
            await tokens_of(site.attempts(PROMPT))
        assert refused.value.status == 429
        assert first.asked and second.asked

    on_site(tmp_path, talk, flow="destination-first")


@pytest.mark.parametrize("lost", ["prefill", "decode"])
def test_when_one_of_two_is_lost_both_are_called_anew_in_another_room(tmp_path, lost):
    async def talk(site):
        workers = dict(zip(("prefill", "decode"), await pair(site, has_room=True), strict=True))
        for worker in workers.values():
            worker.gate.clear()
        reading = asyncio.create_task(tokens_of(site.attempts(PROMPT, limit=1)))
        await until_async(lambda: all(worker.asked for worker in workers.values()))
        second = await site.worker(lost, has_room=lost == "prefill")
        await site.until_there(second)
        await workers[lost].runtime.close()
        kept = workers["decode" if lost == "prefill" else "prefill"]
        await until_async(lambda: len(kept.asked) == 2)
        kept.gate.set()
        assert (await reading)[0] == expected()
        rooms = [request["kv_transfer_params"]["bootstrap_room"] for request in kept.asked]
        assert rooms[0] != rooms[1] == only(second.asked)["kv_transfer_params"]["bootstrap_room"]

    on_site(tmp_path, talk, flow="destination-first")


def test_who_has_all_kv_needs_its_prefill_worker_no_more(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site, has_room=True)
        decode.pause_after = 1
        decode.gate.clear()
        attempts = site.attempts(PROMPT)
        first = (await attempts.take()).tokens
        await prefill.runtime.close()
        decode.gate.set()
        assert first + (await tokens_of(attempts))[0] == expected()

    on_site(tmp_path, talk, flow="destination-first")


# Who computes a prompt


def test_a_request_for_one_instance_is_answered_there_whole(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        assert (await tokens_of(site.attempts(PROMPT, instance_id=decode.id)))[0] == expected()
        assert (decode.num_local, prefill.asked) == (1, [])
        with pytest.raises(ApiError, match="has no instance") as refused:
            site.attempts(PROMPT, instance_id=prefill.id)
        assert refused.value.status == 503

    on_site(tmp_path, talk)


def test_a_prompt_of_which_little_is_left_stays_with_the_decode_worker_that_has_the_rest(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        for num_local in (0, 1):
            attempts = site.attempts(PROMPT)
            assert (await tokens_of(attempts))[0] == expected()
            assert (attempts.flight.is_bypassed, decode.num_local, len(prefill.asked)) == (
                bool(num_local),
                num_local,
                1,
            )

    on_site(tmp_path, talk, conditional_disagg="isl_bounding")


def test_a_prompt_stays_with_its_decode_worker_while_prefill_workers_are_busy(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        prefill.gate.clear()
        first = asyncio.create_task(tokens_of(site.attempts(PROMPT)))
        await until_async(lambda: prefill.asked)
        second = site.attempts(SHORT)
        assert (await tokens_of(second))[0] == expected(prompt=SHORT)
        assert (second.flight.is_bypassed, decode.num_local, len(prefill.asked)) == (True, 1, 1)
        prefill.gate.set()
        assert (await first)[0] == expected()

    on_site(tmp_path, talk, conditional_disagg="prefill_load", prefill_busy_tokens=9)


def test_a_client_that_shares_out_a_request_itself_is_not_interfered_with(tmp_path):
    async def talk(site):
        prefill, decode = await pair(site)
        own = {"do_remote_decode": True, "do_remote_prefill": False}
        _, outputs = await tokens_of(site.attempts(PROMPT, params=own, max_tokens=1))
        found = outputs[-1].kv_transfer_params
        assert (len(prefill.asked), found["do_remote_prefill"]) == (1, True)
        assert (await tokens_of(site.attempts(PROMPT, params=found)))[0] == expected()
        assert (len(prefill.asked), decode.num_local) == (1, 0)

    on_site(tmp_path, talk)


# Pools


@pytest.mark.parametrize("order", [("prefill", "decode"), ("decode", "prefill")])
def test_workers_come_in_any_order_and_prefill_workers_go(tmp_path, order):
    async def talk(site):
        workers = {role: await site.worker(role) for role in order}
        await site.until_there(*workers.values())
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert workers["decode"].num_local == 0
        await workers["prefill"].runtime.close()
        await until_async(lambda: site.model.stages.prefill is None)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert workers["decode"].num_local == 1
        await site.until_there(await site.worker("prefill"))
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert workers["decode"].num_local == 1
        await workers["decode"].runtime.close()
        await until_async(lambda: site.model is None)
        assert site.models.is_expected("apart")

    on_site(tmp_path, talk)


def test_where_disaggregation_is_enforced_a_request_waits_for_a_prefill_worker(tmp_path):
    async def talk(site):
        decode = await site.worker("decode")
        await site.until_there(decode)
        attempts = site.attempts(PROMPT)
        placing = asyncio.create_task(attempts.until_placed())
        prefill = await site.worker("prefill")
        await placing
        assert (await tokens_of(attempts))[0] == expected()
        assert (len(prefill.asked), decode.num_local) == (1, 0)

    on_site(tmp_path, talk, enforce_disagg=True)


def test_where_disaggregation_is_enforced_a_request_fails_if_no_prefill_worker_comes(tmp_path, monkeypatch):
    monkeypatch.setattr("serving.life.life.PATIENCE_S", 0.1)

    async def talk(site):
        await site.until_there(await site.worker("decode"))
        attempts = site.attempts(PROMPT)
        with pytest.raises(ApiError, match="there is no prefill worker") as refused:
            await attempts.until_placed()
        assert refused.value.status == 503
        await site.until_there(await site.worker("prefill"))
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()

    on_site(tmp_path, talk, enforce_disagg=True)


def test_aggregated_workers_answer_whole_requests_whoever_is_beside_them(tmp_path, caplog):
    async def talk(site):
        prefill, whole = await site.worker("prefill"), await site.worker("aggregated")
        await site.until_there(whole)
        await until_async(lambda: "the prefill workers serve only workers with the role decode" in caplog.text)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert (prefill.asked, whole.num_local) == ([], 1)
        decode = await site.worker("decode", component="decode")
        await site.until_there(prefill, decode)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert (len(prefill.asked), len(decode.asked), len(whole.asked)) == (1, 1, 1)
        await decode.runtime.close()
        await site.until_there(whole)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert whole.num_local == 2

    with caplog.at_level(logging.WARNING):
        on_site(tmp_path, talk)


def test_pools_with_other_block_sizes_are_apart_and_the_log_says_so(tmp_path, caplog):
    async def talk(site):
        prefill, decode = await site.worker("prefill", kv_cache_block_size=8), await site.worker("decode")
        await site.until_there(decode)
        await until_async(lambda: "KV block size" in caplog.text)
        assert (await tokens_of(site.attempts(PROMPT)))[0] == expected()
        assert (decode.num_local, prefill.asked) == (1, [])

    with caplog.at_level(logging.WARNING):
        on_site(tmp_path, talk)


def test_an_address_is_for_workers_of_one_role(tmp_path):
    async def talk(site):
        await site.worker("decode")
        with pytest.raises(
            ModelError, match=r"already has decode workers of 'apart'.*such as dyn://test.prefill.generate"
        ):
            await site.worker("prefill", component="backend")

    on_site(tmp_path, talk)


def test_each_pool_is_routed_to_in_the_mode_that_its_workers_ask_for(tmp_path):
    async def talk(site):
        await site.until_there(await site.worker("prefill", router_mode="kv"), await site.worker("decode"))
        stages = site.model.stages
        assert (stages.prefill.core.mode, stages.decode.core.mode) == ("kv", "round-robin")

    on_site(tmp_path, talk, router_mode="round-robin")


@pytest.mark.parametrize("flow", ["source-first", "destination-first"])
def test_each_pool_may_have_a_router_of_its_own(tmp_path, flow):
    async def talk(site):
        prefills = [await site.worker("prefill", has_room=True) for _ in range(2)]
        decodes = [await site.worker("decode") for _ in range(2)]
        routers = {f"{await site.router(component):x}" for component in ("prefill", "backend")}
        await until_async(lambda: site.models.instances() == routers)
        for number in range(4):
            prompt = PROMPT + number
            assert (await tokens_of(site.attempts(prompt)))[0] == expected(prompt=prompt)
        for pool in (prefills, decodes):
            assert sum(len(worker.asked) for worker in pool) == 4
            assert all(worker.asked and not worker.num_local for worker in pool)

    on_site(tmp_path, talk, namespace="routers", flow=flow)


def test_a_router_of_its_own_refuses_workers_that_only_a_frontend_can_pair(tmp_path):
    async def talk(site):
        await site.worker("prefill", has_room=True, is_needed=True)
        service = RouterService(
            await site.join(), RouterServiceConfig(workers="dyn://test.prefill.generate"), RouterConfig()
        )
        with pytest.raises(ModelError, match="let the frontend route to them itself"):
            await service.run()

    on_site(tmp_path, talk)
