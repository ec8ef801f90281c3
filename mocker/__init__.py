"""Simulated inference engines: the scheduler and KV cache of a real one as a plain state machine, laid out in time.

No clock, no I/O, no tokens: a request brings its lengths and the ids of its blocks, `schedule` closes a batch and returns
its duration, and `complete` returns its results.
"""

from mocker.chain import BlockChain
from mocker.engine import Engine
from mocker.events import AllBlocksCleared, BlockRemoved, BlockStored
from mocker.families import new_engine
from mocker.sequence import Sequence
from mocker.sglang.config import SglangConfig
from mocker.step import Step, StepOutput
from mocker.trtllm.config import TrtllmConfig
from mocker.vllm.config import EngineConfig

__all__ = [
    "AllBlocksCleared",
    "BlockChain",
    "BlockRemoved",
    "BlockStored",
    "Engine",
    "EngineConfig",
    "Sequence",
    "SglangConfig",
    "Step",
    "StepOutput",
    "TrtllmConfig",
    "new_engine",
]
