"""Rehearsals in which bits of KV flip and disks are slow or full: what is damaged is computed again, and never used."""

import builtins
import io
import os
from dataclasses import replace

import pytest

from dynabench.deployment.description import Deployment, Pool
from dynabench.deployment.kv_store import KvStoreConfig
from dynabench.rehearsal.all_seeds import replay
from dynabench.rehearsal.clients.client import Question
from dynabench.rehearsal.faults.draw import HARSH, idle_kinds
from dynabench.rehearsal.faults.fault import Fault
from dynabench.rehearsal.run import Rehearsal, rehearse
from mocker import EngineConfig
from serving.engines.kv import reader
from serving.kv_tiers.store_client import StoreTier
from serving.kv_tiers.tier import ChunkFormat

BLOCK_GIB = 16 * 131_072 / (1 << 30)
STORED = Deployment(
    router_mode="round-robin",
    pools=(
        Pool(
            replicas=3,
            mocker=EngineConfig(num_gpu_blocks=60, num_host_blocks=12, block_size=16, kv_disk_size=30 * BLOCK_GIB),
        ),
    ),
    kv_store=KvStoreConfig(kv_store_size=150 * BLOCK_GIB),
)
HANDED_OVER = Deployment(
    router_mode="kv",
    pools=(
        Pool(name="prefill", role="prefill", replicas=2),
        Pool(name="decode", role="decode", replicas=2, mocker=EngineConfig(kv_load_failure_policy="recompute")),
    ),
)
ASKED = [Question(number, number * 0.08, [97 + number * 7 % 12] * 160, 5) for number in range(40)]
SLOW_STORE = Fault("slow-store", 0.0, 4.0, "kv-store", amount=0.2)
FLIPS = Fault("bit-flip", 0.0, 4.0, amount=0.2)


def violations(deployment, *faults, seed=0):
    outcome = replay(deployment, Rehearsal(seed, ASKED, list(faults)))
    return [violation.invariant for violation in outcome.violations], outcome.num_failed


@pytest.mark.parametrize("seed", [0, 6])
@pytest.mark.parametrize("deployment", [STORED, HANDED_OVER], ids=["store", "hand-over"])
def test_kv_whose_bits_flip_is_computed_again(deployment, seed):
    assert violations(deployment, FLIPS, seed=seed) == ([], 0)


def test_a_checksum_of_the_store_that_is_not_checked_is_found(monkeypatch):
    monkeypatch.setattr(ChunkFormat, "find_fault", lambda *_: "")
    assert violations(STORED, FLIPS, seed=2) == (["unspoiled"], 0)


def test_a_ticket_that_is_not_checked_is_found(monkeypatch):
    monkeypatch.setattr(reader, "find_fault", lambda *_: "")
    assert violations(HANDED_OVER, FLIPS) == (["unspoiled"], 0)


@pytest.mark.parametrize("kind", ["slow-disk", "full-disk"])
def test_slow_and_full_disks_change_when_answers_come_and_fail_nothing(kind):
    faults = [Fault(kind, 0.0, 4.0, f"worker-{number}", amount=0.3) for number in range(3)]
    calm, outcome = (rehearse(STORED, Rehearsal(0, ASKED, some)) for some in ([], faults))
    assert (outcome.violations, outcome.num_failed, outcome.texts) == ([], 0, calm.texts)
    assert outcome.digest != calm.digest


def test_a_store_that_is_killed_excuses_no_request():
    assert violations(STORED, Fault("kill", 0.5, 2.0, "kv-store"), Fault("kill", 2.0, 1.0, "kv-store")) == ([], 0)


def test_a_store_that_is_slow_fails_nothing():
    assert violations(STORED, SLOW_STORE) == ([], 0)


def test_a_connection_to_the_store_that_is_kept_after_a_call_was_cancelled_is_found(monkeypatch):
    async def on_link(tier, talk):
        link = tier._idle.pop() if tier._idle else await tier._dial()
        try:
            return await talk(link)
        finally:
            tier._idle.append(link)

    impatient = EngineConfig(
        num_gpu_blocks=60, num_host_blocks=12, block_size=16, kv_prefetch_policy="timeout", kv_prefetch_timeout_s=0.05
    )
    deployment = replace(STORED, pools=(Pool(replicas=3, mocker=impatient),))
    assert violations(deployment, SLOW_STORE) == ([], 0)
    monkeypatch.setattr(StoreTier, "_on_link", on_link)
    assert violations(deployment, SLOW_STORE) == (["unread"], 0)


def test_a_chunk_of_the_store_that_is_wrong_although_no_bit_has_flipped_is_found(monkeypatch):
    monkeypatch.setattr(ChunkFormat, "find_fault", lambda *_: "something")
    assert violations(STORED, Fault("kill", 0.5, 1.0, "worker-0")) == (["sound"], 0)


def test_no_faults_are_drawn_of_what_a_deployment_has_not():
    kv = {"bit-flip", "slow-disk", "full-disk", "slow-store"}
    assert idle_kinds(Deployment(router_mode="kv")) == kv
    assert idle_kinds(Deployment(router_mode="least-loaded")) == kv | {"early-timeout"}
    assert idle_kinds(HANDED_OVER) == {"slow-disk", "full-disk", "slow-store"}
    assert not idle_kinds(STORED)
    assert idle_kinds(Deployment()) <= {*HARSH}


def test_programs_that_are_rehearsed_write_no_file(monkeypatch):
    """Those that do need files of their node, which outlive it."""
    written, opened, handle = [], builtins.open, os.open

    def note_open(file, mode="r", *more, **others):
        written.extend([file] if set(mode) & set("wax+") else [])
        return opened(file, mode, *more, **others)

    def note_handle(file, flags, *more, **others):
        written.extend([file] if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) else [])
        return handle(file, flags, *more, **others)

    for module in (builtins, io):
        monkeypatch.setattr(module, "open", note_open)
    monkeypatch.setattr(os, "open", note_handle)
    for deployment in (STORED, HANDED_OVER):
        assert violations(deployment, Fault("kill", 1.0, 1.0, next(iter(deployment.pools)).name + "-0")) == ([], 0)
    assert written == []
