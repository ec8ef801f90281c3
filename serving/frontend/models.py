"""The models that the network serves, as the frontend sees them: grouped by name, there as long as an instance is."""

import asyncio
import logging
from functools import partial

from prometheus_client.core import GaugeMetricFamily, Metric

from serving.frontend.config import FrontendConfig
from serving.frontend.preparing.preparer import Preparer
from serving.frontend.preprocess import TextModel
from serving.life import DisaggregationConfig
from serving.life.life import PATIENCE_S
from serving.model.card import ModelCard
from serving.model.errors import ModelError
from serving.model.files import ModelFiles, files_address
from serving.model.watch import watch_cards
from serving.router import RouterConfig
from serving.routing.following import traits_of
from serving.routing.live import Routing
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError

log = logging.getLogger(__name__)

RETRY_S = 0.5
MAX_SEEN = 1000
"""Names of models that are remembered after their last instance has gone."""


class ServedModel:
    """A model that can be asked."""

    def __init__(self, text: TextModel, routing: Routing, preparer: Preparer) -> None:
        self.card = text.card
        self.text = text
        self.routing = routing
        self.preparer = preparer


class _Group:
    """The instances that serve one model alike, and what was made of them."""

    def __init__(self) -> None:
        self.cards: dict[str, ModelCard] = {}
        self.routing: Routing | None = None
        self.model: ServedModel | None = None
        self.preparer: Preparer | None = None
        self.opening: asyncio.Task[None] | None = None
        self.leaving: asyncio.TimerHandle | None = None
        """Runs while there is no instance: requests in progress go on at one that comes back in time."""

    @property
    def is_there(self) -> bool:
        """Whether the model can be asked for."""
        return self.model is not None and bool(self.cards)


def _complain(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("a model could not be opened", exc_info=error)


class Models:
    """Follows model cards."""

    def __init__(
        self,
        runtime: DistributedRuntime,
        config: FrontendConfig,
        router: RouterConfig,
        disaggregation: DisaggregationConfig = DisaggregationConfig(),  # noqa: B008 (frozen)
    ) -> None:
        self._runtime = runtime
        self._config = config
        self._router = router
        self._disaggregation = disaggregation
        self._groups: dict[tuple[str, str], _Group] = {}  # by model name and card checksum
        self._contents: dict[str, bytes] = {}  # of models' files, by SHA-256
        self._seen: dict[str, None] = {}  # names of models that were known once, the oldest first
        self._closing: set[asyncio.Task[None]] = set()

    async def start(self) -> None:
        """Watch."""
        namespace = self._config.namespace
        await watch_cards(self._runtime.discovery, self._on_card, *((namespace,) if namespace else ()))

    async def close(self) -> None:
        """End what was started for the models."""
        for group in self._groups.values():
            if group.leaving is not None:
                group.leaving.cancel()
            if group.opening is not None:
                group.opening.cancel()
        await asyncio.gather(*(group.preparer.close() for group in self._groups.values() if group.preparer))

    def get(self, name: str) -> ServedModel | None:
        """Return a model by its name; of several groups of instances under one name, the first."""
        for (known, _), group in self._groups.items():
            if known == name and group.is_there:
                return group.model
        return None

    def is_expected(self, name: str) -> bool:
        """Tell whether a model that is not served now may be soon: it was known before, or nothing has been yet."""
        return name in self._seen or not self._seen

    def all(self) -> list[ServedModel]:
        """Return every model."""
        there = [group.model for group in reversed(self._groups.values()) if group.model and group.is_there]
        found = {model.card.name: model for model in there}
        return [found[name] for name in sorted(found)]

    def instances(self) -> set[str]:
        """Return the ids of the instances that can be routed to."""
        return {f"{worker.instance_id:x}" for model in self.all() for worker in model.routing.workers()}

    def worker_gauges(self) -> list[Metric]:
        """Return what workers reported last, as metrics."""
        names = {
            "kv_active_blocks": ("KV blocks in use", "kv_active_blocks"),
            "kv_total_blocks": ("KV blocks there are", "kv_total_blocks"),
            "requests_running": ("Requests in the batch", "num_running"),
            "requests_waiting": ("Requests that wait for a place in the batch", "num_waiting"),
        }
        gauges: list[Metric] = []
        for name, (text, attribute) in names.items():
            gauge = GaugeMetricFamily(f"dynamo_component_{name}", text, labels=["model", "instance", "rank"])
            for model in self.all():
                for worker, report in sorted(model.routing.loads.items()):
                    labels = [model.card.name, f"{worker.instance_id:x}", str(worker.rank)]
                    gauge.add_metric(labels, getattr(report, attribute))
            gauges.append(gauge)
        workers = GaugeMetricFamily("dynamo_frontend_workers", "Workers that can be routed to", labels=["model"])
        for model in self.all():
            workers.add_metric([model.card.name], model.routing.num_workers)
        return [*gauges, workers]

    def _on_card(self, key: str, card: ModelCard | None) -> None:
        if card is None:
            self._on_leave(key)
            return
        self._remember(card.name)
        group = self._group_of(key, card)
        group.cards[key] = card
        if group.opening is None:
            group.opening = asyncio.create_task(self._open(group, card))
            group.opening.add_done_callback(_complain)
        elif group.routing is not None:
            group.routing.on_card(card.instance_id)

    def _on_leave(self, key: str) -> None:
        for (name, checksum), group in self._groups.items():
            if group.cards.pop(key, None) is not None and not group.cards:
                log.info("model %s is gone", name)
                loop = asyncio.get_running_loop()
                group.leaving = loop.call_later(PATIENCE_S, self._drop, name, checksum)

    def _remember(self, name: str) -> None:
        self._seen.pop(name, None)
        self._seen[name] = None
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def _group_of(self, key: str, card: ModelCard) -> _Group:
        """Return the group that a card belongs to, a fresh one if there is none that serves the model alike."""
        others = [checksum for (name, checksum), group in self._groups.items() if name == card.name and group.cards]
        if others and card.checksum not in others:
            log.warning(
                "%s serves %s with other settings than the instances known before: it is a group of its own",
                key,
                card.name,
            )
        group = self._groups.setdefault((card.name, card.checksum), _Group())
        if group.leaving is None:
            return group
        group.leaving.cancel()
        group.leaving = None
        if group.model is not None and card.is_like(group.model.card):
            return group
        self._drop(card.name, card.checksum)  # it comes back with other settings
        group = self._groups[card.name, card.checksum] = _Group()
        return group

    def _drop(self, name: str, checksum: str) -> None:
        group = self._groups.pop((name, checksum))

        async def close() -> None:
            if group.opening is not None:
                group.opening.cancel()
                await asyncio.gather(group.opening, return_exceptions=True)
            if group.preparer is not None:
                await group.preparer.close()
            if group.routing is not None:
                await group.routing.close()

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _open(self, group: _Group, card: ModelCard) -> None:
        """Make a group of instances ready to be asked."""
        group.routing = routing = Routing(
            self._runtime,
            card.address,
            mode=card.router_mode or self._config.router_mode,
            config=self._router,
            block_size=card.kv_cache_block_size,
            seed=self._config.seed,
            traits=partial(traits_of, group.cards),
        )
        await routing.start()
        while True:
            try:
                await routing.wait_for_workers()
                await self._load(group, card, routing)
            except (ModelError, CallError, TimeoutError, OSError) as error:
                log.warning("model %s cannot be served yet: %s", card.name, error)
                await asyncio.sleep(RETRY_S)
            else:
                log.info("model %s is served at %s", card.name, card.address)
                return

    async def _load(self, group: _Group, card: ModelCard, routing: Routing) -> None:
        """Load a model's tokenizer and template from the files of any instance."""
        files = await ModelFiles.receive(
            card.files, partial(routing.call_any, files_address(card.address)), self._contents
        )
        if files.contents:
            log.info("model %s: its tokenizer and chat template are being loaded", card.name)
        if group.preparer is None:
            group.preparer = Preparer(card, files, timeout_s=self._config.prepare_timeout_s)
        # Without files no template is the model's own, and hardly a request needs a preparer.
        starting = group.preparer.start() if files.contents else asyncio.sleep(0)
        text, started = await asyncio.gather(
            asyncio.to_thread(TextModel, card, files), starting, return_exceptions=True
        )
        for failure in (text, started):
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(text, TextModel)
        group.model = ServedModel(text, routing, group.preparer)
