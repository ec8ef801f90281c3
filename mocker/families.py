"""The families of engines. Each has a scheduler of its own; what lays its decisions out in time is the same for all."""

from typing import Any, TypeVar

from mocker.contract import AdapterMemory, EngineSettings
from mocker.core import NewCore, NewCoreOfRanks
from mocker.counted_engine import CountedEngine
from mocker.engine import Engine
from mocker.installed.engine import InstalledEngine
from mocker.installed.scheduler import NewScheduler
from mocker.installed.settings import sglang_settings, vllm_settings, why_not_installed
from mocker.installed.sglang_core import InstalledSglangCore
from mocker.installed.vllm_core import InstalledVllmCore
from mocker.models.kv_groups import KvLayout
from mocker.pipelined_engine import PipelinedEngine
from mocker.sglang.apart import new_sglang_core
from mocker.sglang.config import SglangConfig
from mocker.sglang.ranks import SglangRanks
from mocker.sglang.watched import WatchedSglangCore
from mocker.speculation.random_drafter import RandomDrafter
from mocker.step_log import StepLog
from mocker.tiers.config import HostMemory
from mocker.timing.model import TimingModel
from mocker.trtllm.apart import new_trtllm_core
from mocker.trtllm.config import TrtllmConfig
from mocker.trtllm.core import TrtllmCore
from mocker.vllm.config import EngineConfig
from mocker.vllm.core import VllmCore
from mocker.vllm.flipped import FlippedConfig
from mocker.vllm.watched import WatchedVllmCore

S = TypeVar("S", bound=EngineSettings)


def family(settings: type[S], core: NewCore[S]) -> dict[type[EngineSettings], NewCore[Any]]:
    """Return a family as an entry of a table; the type checker sees that the core takes the settings."""
    return {settings: core}


CORES = {
    **family(EngineConfig, VllmCore),
    **family(FlippedConfig, VllmCore),
    **family(SglangConfig, new_sglang_core),
    **family(TrtllmConfig, new_trtllm_core),
}
"""How the core of each family is made, by the class of its settings."""
CORES_OF_RANKS: dict[type[EngineSettings], NewCoreOfRanks[Any]] = {SglangConfig: SglangRanks, TrtllmConfig: TrtllmCore}
"""The same with attention DP, where the ranks of an engine take their steps together."""


def new_engine(
    config: EngineSettings,
    timing: TimingModel,
    *,
    num_blocks: int,
    num_ranks: int = 1,
    host: HostMemory | None = None,
    layout: KvLayout | None = None,
    adapters: AdapterMemory | None = None,
    kv_events: bool = True,
    ordered_events: bool = True,
    acceptance: tuple[float, ...] = (),
    seed: int = 0,
    stage_shares: tuple[float, ...] = (),
    encoding_s: float = 0.0,
    installed: NewScheduler | None = None,
    steps: StepLog | None = None,
) -> Engine:
    """Return an idle engine of the family to which its settings belong.

    Args:
        config: its settings.
        timing: the step-time model.
        num_blocks: KV blocks, vLLM's null block included; SGLang's pages. With several ranks, those of each.
        num_ranks: ranks of attention DP.
        host: its host memory, if it keeps KV there.
        layout: the groups of the model's layers, if they do not all keep the same.
        adapters: where they are and how long it takes to move them (None: no time).
        kv_events: report KV events.
        ordered_events: inside a leap, put events in the exact order of the real engine (at a cost per block) instead of
            one sequence after another.
        acceptance: how often each draft of a step is accepted, by position, if it speculates.
        seed: of what is drawn: how many drafts are accepted, request by request.
        stage_shares: vLLM: which share of a batch's time each stage of the model takes, if it is cut into stages.
        encoding_s: vLLM: how long the encoder takes for a token of an image (s), if the model has one.
        installed: makes the scheduler that decides in place of ours, if one does.
        steps: vLLM and SGLang: logs what is decided.

    Raises:
        ValueError: an installed scheduler cannot be used with these settings.
    """
    if installed is not None:
        why = why_not_installed(
            config,
            has_host=host is not None,
            has_layout=layout is not None,
            num_stages=len(stage_shares),
            num_ranks=num_ranks,
        )
        if why is not None:
            raise ValueError(why)
        if isinstance(config, SglangConfig):
            scheduler = installed(sglang_settings(config, num_blocks, kv_events=kv_events))
            judge = InstalledSglangCore(config, num_blocks, scheduler, steps=steps)
            return InstalledEngine(config, judge, timing, kv_events=kv_events)
        assert isinstance(config, EngineConfig)
        return _installed_engine(
            config, timing, installed, num_blocks, adapters, acceptance, seed, steps, kv_events=kv_events
        )
    if isinstance(config, EngineConfig) and (config.num_speculative_tokens or stage_shares or config.has_encoder):
        drafter = RandomDrafter(acceptance, seed) if acceptance else None
        counted = (VllmCore if steps is None else WatchedVllmCore)(
            config,
            num_blocks,
            host,
            layout,
            kv_events=kv_events,
            drafter=drafter,
            num_stages=len(stage_shares) or 1,
            is_counted=True,
        )
        if isinstance(counted, WatchedVllmCore) and steps is not None:
            counted.steps = steps
        if stage_shares:
            assert host is None, "engines with stages have no host memory"
            assert adapters is None, "nor adapters that take time to load"
            return PipelinedEngine(
                config,
                counted,
                timing,
                stage_shares=stage_shares,
                kv_events=kv_events,
                ordered_events=ordered_events,
                drafter=drafter,
            )
        return CountedEngine(
            config,
            counted,
            timing,
            host=host,
            adapters=adapters,
            kv_events=kv_events,
            ordered_events=ordered_events,
            drafter=drafter,
            encoder_counts=None if counted.encoder is None else counted.encoder.counts,
            encoding_s=encoding_s,
        )
    if num_ranks > 1:
        new_core = CORES_OF_RANKS[type(config)]
        core = new_core(config, num_blocks, host, layout, num_ranks=num_ranks, kv_events=kv_events)
    elif steps is not None and isinstance(config, SglangConfig):
        core = logged = WatchedSglangCore(config, num_blocks, host, layout, kv_events=kv_events)
        logged.steps = steps
    elif steps is not None:
        assert isinstance(config, EngineConfig), "only the steps of vLLM's family and of SGLang's are logged"
        core = watched = WatchedVllmCore(config, num_blocks, host, layout, kv_events=kv_events)
        watched.steps = steps
    else:
        core = CORES[type(config)](config, num_blocks, host, layout, kv_events=kv_events)
    return Engine(
        config, core, timing, host=host, adapters=adapters, kv_events=kv_events, ordered_events=ordered_events
    )


def _installed_engine(
    config: EngineConfig,
    timing: TimingModel,
    installed: NewScheduler,
    num_blocks: int,
    adapters: AdapterMemory | None,
    acceptance: tuple[float, ...],
    seed: int,
    steps: StepLog | None,
    *,
    kv_events: bool,
) -> Engine:
    scheduler = installed(vllm_settings(config, num_blocks, kv_events=kv_events))
    drafter = RandomDrafter(acceptance, seed) if acceptance else None
    core = InstalledVllmCore(config, num_blocks, scheduler, drafter=drafter, steps=steps)
    if drafter is None:
        return InstalledEngine(config, core, timing, adapters=adapters, kv_events=kv_events)
    return CountedEngine(config, core, timing, adapters=adapters, kv_events=kv_events, drafter=drafter)
