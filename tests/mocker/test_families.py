"""Another family of engines: its settings have no more than every engine has, and its core is one line in the table."""

from dataclasses import dataclass

import pytest

from mocker import BlockChain, EngineConfig, Sequence, families, new_engine
from mocker.contract import KvRole
from mocker.timing.constant import Constant
from mocker.vllm.core import VllmCore


@dataclass(frozen=True)
class OtherSettings:
    block_size: int = 4
    max_model_len: int | None = None
    kv_role: KvRole | None = None
    is_async: bool = False
    is_kv_consumer: bool = False


def other_core(config, num_blocks, host, more, *, kv_events):
    settings = EngineConfig(block_size=config.block_size, async_scheduling=config.is_async)
    return VllmCore(settings, num_blocks, host, more, kv_events=kv_events)


@pytest.fixture
def with_another_family(monkeypatch):
    monkeypatch.setitem(families.CORES, OtherSettings, other_core)


@pytest.mark.usefixtures("with_another_family")
def test_an_engine_needs_of_another_family_only_a_core_and_the_settings_that_all_have():
    engine = new_engine(OtherSettings(), Constant(1.0, 1.0), num_blocks=9)
    engine.add(Sequence("a", num_prompt=4, max_tokens=3, chain=BlockChain([])))
    ends = []
    while (step := engine.schedule(ends[-1] if ends else 0.0)) is not None:
        engine.complete()
        ends.append(step.end)
    assert len(ends) == 3
    assert engine.is_idle
