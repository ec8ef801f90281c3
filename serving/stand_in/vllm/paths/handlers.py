"""The rooms of the server: each has the handlers of some paths, and what they share."""

from serving.engines.mock.engine import Mocker
from serving.frontend.answering import Answering
from serving.stand_in.config import StandInConfig
from serving.stand_in.served import OneModel
from serving.stand_in.vllm.metrics.metrics import VllmMetrics
from serving.stand_in.vllm.paths.caches import CachePaths
from serving.stand_in.vllm.paths.dev import Development
from serving.stand_in.vllm.paths.health import Health
from serving.stand_in.vllm.paths.invocations import Invocations
from serving.stand_in.vllm.paths.lora import Adapters
from serving.stand_in.vllm.paths.models import ModelPaths
from serving.stand_in.vllm.paths.progress import RunningRequests
from serving.stand_in.vllm.paths.scale import Scale
from serving.stand_in.vllm.paths.sleep import Sleep
from serving.stand_in.vllm.paths.tokens import Tokens
from serving.stand_in.vllm.paths.weights import Weights


class PathHandlers:
    """See the module."""

    def __init__(
        self, config: StandInConfig, engine: Mocker, models: OneModel, answering: Answering, metrics: VllmMetrics
    ) -> None:
        """Furnish the rooms.

        Raises:
            ValueError: an adapter that is served from the start cannot be loaded.
        """
        self.config = config
        self.answering = answering
        self.adapters = None if config.lora is None else Adapters(config.lora, models)
        self.caches = CachePaths(engine)
        self.dev = Development(config, engine)
        self.health = Health(config, answering, metrics)
        self.invocations = Invocations(answering, models.names[0])
        self.models = ModelPaths(models, config.model)
        self.progress = RunningRequests(engine)
        self.scale = Scale(config.ranks.size)
        self.sleep = Sleep(engine, metrics)
        self.tokens = Tokens(answering.reader, models)
        self.weights = Weights()
