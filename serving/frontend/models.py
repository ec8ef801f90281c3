"""The models on the network as the frontend sees them. A model exists as long as an instance can answer for it.

Instances that serve a model with the same settings at one address form a pool. A decode or aggregated pool answers; a
decode pool is paired with a prefill pool whose model has the same card checksum. Pools come and go in any order.

    pools of a model        what happens to a request
    decode, prefill         prefilled by one, answered by the other
    decode                  whole at a decode worker; with `enforce_disagg`, it waits for a prefill worker
    aggregated, prefill     whole at an aggregated worker, which never reads others' KV: that needs the role decode
    decode, aggregated      as if there were no aggregated pool, until the decode pool is gone
    prefill                 no model, except for clients that direct requests (`allow_kv_transfer_params`)
"""

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import partial

from foundation.text import one_line
from serving.frontend.config import FrontendConfig
from serving.frontend.preparing.preparer import Preparer
from serving.frontend.served_model import SHOWN_CHARACTERS, ServedModel
from serving.frontend.text_model import TextModel
from serving.life import DisaggregationConfig
from serving.life.life import PATIENCE_S
from serving.model.adapter import Adapter
from serving.model.card import ModelCard, Role
from serving.model.errors import ModelError
from serving.model.files import ModelFiles, files_address
from serving.model.watch import watch_cards
from serving.router import RouterConfig
from serving.router.books import RankBooks
from serving.routing.following import traits_of
from serving.routing.live import LiveRouting
from serving.routing.placement import RankAddress
from serving.routing.stages import Stages
from serving.runtime.address import EndpointAddress
from serving.runtime.distributed import DistributedRuntime
from serving.runtime.messages import CallError
from serving.worker.load_reports import LoadReport

log = logging.getLogger(__name__)

RETRY_S = 0.5
ASKED = ("decode", "aggregated", "prefill")
"""The roles that requests for a model go to, in this order; to prefill only from clients that direct requests."""
MAX_SEEN = 1000
"""How many names of models are remembered after their last instance has gone."""


class ModelPool:
    """The instances that serve one model with the same settings, role and address, and what is built on them."""

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        """The card of its first instance."""
        self.cards: dict[str, ModelCard] = {}
        self.routing: LiveRouting | None = None
        self.model: ServedModel | None = None
        """The model, if these instances answer."""
        self.adapters: dict[str, ServedModel] = {}
        """The same with each of its LoRA adapters, by the adapter's name."""
        self.preparer: Preparer | None = None
        self.opening: asyncio.Task[None] | None = None
        self.leaving: asyncio.TimerHandle | None = None
        """Runs while there is no instance: requests in progress continue on one that returns in time."""

    @property
    def is_open(self) -> bool:
        """Whether it can answer or prefill."""
        return bool(self.cards) and (
            self.model is not None or (self.card.role == "prefill" and self.routing is not None)
        )

    def prefills_for(self, model: ServedModel) -> bool:
        """Return whether it computes prompts for a model."""
        return (self.card.role, model.card.role) == ("prefill", "decode") and self.card.checksum == model.card.checksum

    def ranks(self) -> list[RankAddress]:
        """Return the ranks that can be routed to."""
        return self.routing.ranks() if self.routing is not None and self.is_open else []

    def loads(self) -> Mapping[RankAddress, LoadReport]:
        """Return the last report of each rank."""
        return {} if self.routing is None else self.routing.loads

    def books(self) -> list[tuple[RankAddress, RankBooks]]:
        """Return the router's books for each rank."""
        return [] if self.routing is None else self.routing.books()


_Key = tuple[str, EndpointAddress, Role]
"""What the instances of a pool have in common: the model (their card's checksum), the address and the role."""


def _key(card: ModelCard) -> _Key:
    return card.checksum, card.address, card.role


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
        self._pools: dict[_Key, ModelPool] = {}
        self._contents: dict[str, bytes] = {}  # contents of models' files, by SHA-256
        self._seen: dict[
            str, set[Role]
        ] = {}  # names of models that were known once, and their workers' roles, the oldest first
        self._closing: set[asyncio.Task[None]] = set()
        self.on_leave: Callable[[int], object] = lambda _: None
        """Is told the id of each instance that is gone."""

    async def start(self) -> None:
        """Watch the cards."""
        namespace = self._config.namespace
        await watch_cards(self._runtime.discovery, self._on_card, *((namespace,) if namespace else ()))

    async def close(self) -> None:
        """Close everything that was started for the models."""
        for pool in self._pools.values():
            if pool.leaving is not None:
                pool.leaving.cancel()
        for key in [*self._pools]:
            self._drop(key)
        await asyncio.gather(*self._closing)

    def get(self, name: str) -> ServedModel | None:
        """Return a model by its name; of several pools with one name, prefer decode, then aggregated."""
        found = [
            pool for pool in self._pools.values() if pool.card.name == name and pool.is_open and pool.model is not None
        ]
        if found:
            return min(found, key=lambda pool: ASKED.index(pool.card.role)).model
        return self._with_adapter(name)

    def _with_adapter(self, name: str) -> ServedModel | None:
        """Return the model with an adapter of this name; a model of the same name goes before."""
        found = [pool for pool in self._pools.values() if name in pool.adapters and pool.is_open]
        return min(found, key=lambda pool: ASKED.index(pool.card.role)).adapters[name] if found else None

    def adapters_of(self, model: ServedModel) -> list[ServedModel]:
        """Return a model with each of its adapters."""
        return [served for pool in self._pools.values() if pool.model is model for served in pool.adapters.values()]

    def is_expected(self, name: str) -> bool:
        """Return whether a model that is not served now may be soon: it was known before, or no model has been yet."""
        is_known = name in self._seen or any(name in pool.card.adapters for pool in self._pools.values())
        return is_known or not self._seen

    def all(self) -> list[ServedModel]:
        """Return every model."""
        names = {pool.card.name for pool in self._pools.values()}
        return [model for name in sorted(names) if (model := self.get(name)) is not None]

    def answering(self) -> list[ServedModel]:
        """Return every model that can answer now: its card may be seen a moment before its first instance."""
        able = [pool.model for pool in self._pools.values() if pool.ranks()]
        return [model for model in self.all() if any(model is each for each in able)]

    def pools(self) -> list[ModelPool]:
        """Return every pool that requests may go to now, in any role."""
        return [
            pool
            for model in self.all()
            for pool in self._pools.values()
            if pool.is_open and (pool.model is model or pool.prefills_for(model))
        ]

    def absence(self, name: str) -> str:
        """Return why an expected model cannot answer."""
        pools = [pool for pool in self._pools.values() if pool.cards]
        roles = {pool.card.role for pool in pools if pool.card.name == name or name in pool.card.adapters}
        if roles == {"prefill"}:
            return f"model {name!r} has prefill workers only; a decode worker (--role decode) is needed to answer"
        return f"no instance serves model {one_line(name, SHOWN_CHARACTERS)!r} at the moment; retry later"

    def absences(self) -> list[str]:
        """Return why models that have workers cannot answer, for each that cannot."""
        names = {pool.card.name for pool in self._pools.values() if pool.is_open}
        return [self.absence(name) for name in sorted(names) if self.get(name) is None]

    def num_workers(self) -> dict[tuple[str, Role], int]:
        """Count the workers that can be routed to, by model and role: 0 if they are gone."""
        counts = {(name, role): 0 for name, roles in self._seen.items() for role in sorted(roles)}
        for pool in self.pools():
            key = pool.card.name, pool.card.role
            counts[key] = counts.get(key, 0) + len(pool.ranks())
        return counts

    def instances(self) -> set[str]:
        """Return the ids of the instances that can be routed to."""
        return {f"{rank.instance_id:x}" for pool in self.pools() for rank in pool.ranks()}

    def _on_card(self, key: str, card: ModelCard | None) -> None:
        if card is None:
            self._on_leave(key)
            return
        self._remember(card)
        pool = self._pool_of(key, card)
        pool.cards[key] = card
        if pool.opening is None:
            pool.opening = asyncio.create_task(self._open(pool, card))
            pool.opening.add_done_callback(_complain)
        elif pool.routing is not None:
            pool.routing.on_card(card.instance_id)

    def _on_leave(self, key: str) -> None:
        for pool_key, pool in self._pools.items():
            card = pool.cards.pop(key, None)
            if card is None:
                continue
            log.info(
                "%s worker %x of model %s is gone: %s",
                *(
                    card.role,
                    card.instance_id,
                    card.name,
                    f"{len(pool.cards)} left" if pool.cards else "it was the last",
                ),
            )
            self.on_leave(card.instance_id)
            if not pool.cards:
                pool.leaving = asyncio.get_running_loop().call_later(PATIENCE_S, self._drop, pool_key)

    def _remember(self, card: ModelCard) -> None:
        roles = self._seen.pop(card.name, set())
        self._seen[card.name] = roles | {card.role}
        if len(self._seen) > MAX_SEEN:
            del self._seen[next(iter(self._seen))]

    def _pool_of(self, key: str, card: ModelCard) -> ModelPool:
        """Return the pool that a card belongs to; make a new one if no pool has the same settings."""
        if (pool := self._pools.get(_key(card))) is None:
            self._compare(key, card)
            pool = self._pools[_key(card)] = ModelPool(card)
        if pool.leaving is None:
            return pool
        pool.leaving.cancel()
        pool.leaving = None
        if (pool.model is not None or card.role == "prefill") and card.is_like(pool.card):
            return pool
        self._drop(_key(card))  # it is back with different settings
        pool = self._pools[_key(card)] = ModelPool(card)
        return pool

    def _compare(self, key: str, card: ModelCard) -> None:
        """Log why the first instance of a new pool does not join an existing one."""
        for other in self._pools.values():
            if not other.cards or other.card.name != card.name:
                continue
            if other.card.checksum != card.checksum:
                log.warning(
                    "%s serves %s with different settings from the %s workers at %s (%s): it gets its own pool",
                    *(key, card.name, other.card.role, other.card.address, card.differences(other.card)),
                )
            elif other.card.address == card.address:
                log.warning(
                    "%s is a %s worker of %s at the address of its %s workers: it gets its own pool",
                    *(key, card.role, card.name, other.card.role),
                )
            elif {card.role, other.card.role} == {"prefill", "aggregated"}:
                log.warning(
                    "%s has aggregated workers, which answer whole requests: the prefill workers serve only workers with the "
                    "role decode",
                    card.name,
                )

    def _drop(self, key: _Key) -> None:
        pool = self._pools.pop(key)

        async def close() -> None:
            if pool.opening is not None:
                pool.opening.cancel()
                await asyncio.gather(pool.opening, return_exceptions=True)
            if pool.preparer is not None:
                await pool.preparer.close()
            if pool.routing is not None:
                await pool.routing.close()

        task = asyncio.create_task(close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _open(self, pool: ModelPool, card: ModelCard) -> None:
        """Get a pool ready to serve."""
        pool.routing = routing = LiveRouting(
            self._runtime,
            card.address,
            mode=card.router_mode or self._config.router_mode,
            config=self._router if card.step_costs is None else self._router.with_costs(card.step_costs),
            block_size=card.kv_cache_block_size,
            seed=self._config.seed,
            traits=partial(traits_of, pool.cards),
            stage=card.role,
            follows_events=self._disaggregation.conditional_disagg != "never",
        )
        await routing.start()
        if card.role == "prefill":
            log.info("prompts of model %s are computed at %s for its decode workers", card.name, card.address)
        if card.role == "prefill" and not self._config.allow_kv_transfer_params:
            return
        while True:
            try:
                await routing.wait_for_workers()
                await self._load(pool, card, routing)
            except (ModelError, CallError, TimeoutError, OSError) as error:
                log.warning("model %s cannot be served yet: %s", card.name, error)
                await asyncio.sleep(RETRY_S)
            else:
                log.info("model %s is served at %s", card.name, card.address)
                return

    async def _load(self, pool: ModelPool, card: ModelCard, routing: LiveRouting) -> None:
        """Load a model's tokenizer and template from the files of any instance."""
        files = await ModelFiles.receive(
            card.files, partial(routing.call_any, files_address(card.address)), self._contents
        )
        if files.contents:
            log.info("model %s: loading its tokenizer and chat template", card.name)
        if pool.preparer is None:
            pool.preparer = Preparer(
                card, files, timeout_s=self._config.prepare_timeout_s, is_strict=self._config.strict
            )
        # Without files there is no template of the model's own, and hardly any request needs a preparer.
        starting = pool.preparer.start() if files.contents else asyncio.sleep(0)
        text, started = await asyncio.gather(
            asyncio.to_thread(TextModel, card, files, is_strict=self._config.strict), starting, return_exceptions=True
        )
        for failure in (text, started):
            if isinstance(failure, BaseException):
                raise failure
        assert isinstance(text, TextModel)
        stages = Stages(routing, self._disaggregation, find_prefill=lambda: self._prefill_of(model))
        model = pool.model = ServedModel(text, stages, pool.preparer)
        pool.adapters = {
            name: ServedModel(text, stages, pool.preparer, Adapter(id, name, path=""))
            for id, name in enumerate(card.adapters, 1)
        }

    def _prefill_of(self, model: ServedModel) -> LiveRouting | None:
        """Return the routing to workers that prefill for a model: the first pool that has any."""
        for pool in self._pools.values():
            if pool.is_open and pool.prefills_for(model) and pool.routing is not None and pool.routing.num_ranks:
                return pool.routing
        return None
