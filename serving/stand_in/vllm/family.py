"""What is particular to vLLM (see `Family`)."""

from contextlib import AbstractAsyncContextManager

from serving.engines.mock.engine import Mocker
from serving.frontend.reading import ReadingElsewhere
from serving.stand_in.config import StandInConfig
from serving.stand_in.faults.state import Faults
from serving.stand_in.local import LocalCalls
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.app import VllmServer
from serving.stand_in.vllm.kv_events.ranks import sinks_of
from serving.stand_in.vllm.kv_events.sink import VllmSink
from serving.stand_in.vllm.paths.paths import ANSWERS
from serving.stand_in.vllm.requests.reading import reading_of


class Vllm:
    """See the module."""

    answers = ANSWERS

    def reading(self, config: StandInConfig) -> ReadingElsewhere:
        """See `Family`."""
        return reading_of(config)

    def sinks(self, config: StandInConfig, faults: Faults | None) -> AbstractAsyncContextManager[list[VllmSink]]:
        """See `Family`."""
        return sinks_of(config, faults)

    def server(self, config: StandInConfig, engine: Mocker, models: OneModel, calls: LocalCalls) -> VllmServer:
        """See `Family`."""
        return VllmServer(config, engine, models, calls)
