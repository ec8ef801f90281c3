"""The families of engines, each with its own scheduler."""

from mocker.engine import Engine
from mocker.models.kv_cache import MoreBlocks
from mocker.timing.model import TimingModel
from mocker.vllm.config import EngineConfig
from mocker.vllm.offload.config import HostMemory


def new_engine(
    config: EngineConfig,
    timing: TimingModel,
    *,
    num_blocks: int,
    host: HostMemory | None = None,
    more: MoreBlocks | None = None,
    max_loras: int | None = None,
    kv_events: bool = True,
    ordered_events: bool = True,
) -> Engine:
    """Return an idle engine of the family to which its settings belong.

    Args:
        config: its settings.
        timing: the step-time model.
        num_blocks: KV blocks, the null block included.
        host: its host memory, if it keeps KV there.
        more: what a sequence holds beside the blocks of its tokens, if the model has layers that do not keep all.
        max_loras: how many adapters may run in one iteration (None: sequences have none).
        kv_events: keep KV events for `take_events`.
        ordered_events: inside a leap, put events in the exact order of the real engine (at a cost per block) instead of
            one sequence after another.
    """
    return Engine(
        config,
        timing,
        num_blocks=num_blocks,
        host=host,
        more=more,
        max_loras=max_loras,
        kv_events=kv_events,
        ordered_events=ordered_events,
    )
