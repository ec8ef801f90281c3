"""A simulated inference engine: vLLM V1's scheduler and KV cache as a plain state machine.

No clock, no I/O, no tokens: a request brings its lengths and the ids of its blocks, `Engine.schedule`
closes a batch and returns its duration, and `Engine.complete` returns its results.
"""

from mocker.chain import BlockChain
from mocker.engine import Engine
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored
from mocker.families import new_engine
from mocker.sequence import Sequence
from mocker.step import Step, StepOutput
from mocker.vllm.config import EngineConfig

__all__ = [
    "AllBlocksCleared",
    "BlockChain",
    "BlockRemoved",
    "BlockStored",
    "Engine",
    "EngineConfig",
    "Sequence",
    "Step",
    "StepOutput",
    "new_engine",
]
