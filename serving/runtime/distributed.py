"""The runtime as a program sees it: `DistributedRuntime -> namespace -> component -> endpoint`."""

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, Self

import msgspec

from foundation.ordered_set import OrderedSet
from serving.runtime.address import EndpointAddress, Instance, slug
from serving.runtime.client import Client
from serving.runtime.cluster_token import ClusterToken, FolderToken
from serving.runtime.config import RuntimeConfig
from serving.runtime.etcd import EtcdDiscovery
from serving.runtime.folder import FolderDiscovery
from serving.runtime.kubernetes.discovery import KubernetesDiscovery
from serving.runtime.kubernetes.names import POD_IP, POD_NAME
from serving.runtime.memory.discovery import MemoryDiscovery
from serving.runtime.memory.events import BrokeredEvents, DirectEvents
from serving.runtime.memory.node import this_node
from serving.runtime.memory.requests import MemoryRequests
from serving.runtime.messages import CallError
from serving.runtime.nats import NatsPlane
from serving.runtime.outages import Outages
from serving.runtime.ports import Channel, Discovery, EventPlane, RequestPlane
from serving.runtime.private_folder import socket_name
from serving.runtime.server import AnswerStream, ClientSession, GeneratorService, RequestDialect, Service
from serving.runtime.sockets import SocketPlane
from serving.runtime.stopping import stop_on_signals, to_its_end
from serving.runtime.world import world
from serving.runtime.zeromq import ZeroMqPlane

log = logging.getLogger(__name__)

AnyDiscovery = EtcdDiscovery | FolderDiscovery | KubernetesDiscovery | MemoryDiscovery

DRAIN_S = 30.0
WITHDRAWAL_S = 1.0
"""How long a process whose engine has failed tries to leave discovery before it hangs up on its callers anyway."""


class DistributedRuntime:
    """One process's membership: its lease, what it serves, and its way to others."""

    def __init__(
        self,
        instance_id: int,
        discovery: Discovery,
        requests: RequestPlane,
        events: EventPlane,
        *,
        drain_s: float,
        stopping: asyncio.Event | None = None,
        token: ClusterToken | FolderToken | None = None,
    ) -> None:
        self.instance_id = instance_id
        self.discovery = discovery
        self.requests = requests
        self.events = events
        self.stopping = stopping or asyncio.Event()
        """Set once the process was asked to stop."""
        self._drain_s = drain_s
        self._token = token
        self.dialects: dict[EndpointAddress, RequestDialect] = {}
        """Of the handlers given to `serve_endpoint`, where they do not take what travels."""
        self._services: dict[str, Service] = {}
        self._sessions: OrderedSet[ClientSession] = OrderedSet()
        self._clients: list[Client] = []
        self._keys: list[str] = []
        self._transport = ""
        self._is_closed = False
        if isinstance(discovery, EtcdDiscovery | MemoryDiscovery):
            discovery.is_answering = self._is_answering

    @classmethod
    async def connect(
        cls, config: RuntimeConfig | None = None, *, drain_s: float = DRAIN_S, stopping: asyncio.Event | None = None
    ) -> Self:
        """Join the network that the settings (default: the environment) describe.

        Args:
            config: how to find and reach the others.
            drain_s: how long calls in progress may take to finish once the process was asked to stop (s).
            stopping: is set when the process is asked to stop (default: a new event).

        Raises:
            RuntimeUnavailableError: a server or folder cannot be used.
        """
        config = config or RuntimeConfig()
        instance_id = world().entropy.getrandbits(62) + 1
        discovery: AnyDiscovery
        if config.discovery_backend == "kubernetes":
            discovery = await KubernetesDiscovery.connect(instance_id, lease_ttl_s=config.lease_ttl_s)
        elif config.discovery_backend == "memory":
            discovery = MemoryDiscovery(this_node(), lease_ttl_s=config.lease_ttl_s)
            await discovery.connect()
        elif config.etcd_endpoints:
            discovery = EtcdDiscovery(config)
            await discovery.connect()
        else:
            discovery = FolderDiscovery(config.folder, instance_id, lease_ttl_s=config.lease_ttl_s)
        try:
            requests, events, token = await _planes(config, instance_id, discovery)
        except BaseException:
            await discovery.close()
            raise
        log.debug("this is instance %x; %s", instance_id, config.describe())
        return cls(instance_id, discovery, requests, events, drain_s=drain_s, stopping=stopping, token=token)

    def namespace(self, name: str) -> "Namespace":
        """Name a namespace."""
        return Namespace(self, slug(name))

    def endpoint(self, address: EndpointAddress) -> "Endpoint":
        """Name an endpoint by its full address."""
        return Endpoint(self, address)

    @property
    def outages(self) -> list[Outages]:
        """The outages of the servers that it needs."""
        return [outages for outages in (self.discovery.outages, self.requests.outages) if outages is not None]

    @property
    def num_streams(self) -> int:
        """Calls being served."""
        return sum(session.num_streams for session in self._sessions)

    async def serve(self, address: EndpointAddress, service: Service, *, is_public: bool = True) -> None:
        """Serve an endpoint from now on; a public one is registered for others to find."""
        target = ".".join(address)
        if target in self._services:
            raise ValueError(f"this process already serves {address}")
        self._services[target] = service
        if not self._transport:
            self._transport = await self.requests.listen(self._accept)
        if is_public:
            instance = Instance(*address, self.instance_id, self._transport, os.environ.get(POD_NAME, ""))
            await self.register(instance.key, msgspec.json.encode(instance))

    async def register(self, key: str, value: bytes) -> None:
        """Put a key into discovery until this process stops accepting work."""
        log.debug("registers %s in discovery", key)
        self._keys.append(key)
        await self.discovery.put(key, value)

    async def client(
        self,
        address: EndpointAddress,
        on_join: Callable[[Instance], None] | None = None,
        on_leave: Callable[[int], None] | None = None,
    ) -> Client:
        """Return a client of an endpoint."""
        client = Client(address, self.discovery, self.requests, on_join, on_leave)
        self._clients.append(client)
        return await client.start()

    async def cluster_token(self) -> Callable[[], bytes]:
        """Return a function that returns the current token of this network's processes.

        Raises:
            RuntimeUnavailableError: the token cannot be found or created.
        """
        token = self._token
        if token is None:
            if isinstance(self.discovery, FolderDiscovery):
                token = FolderToken(self.discovery)
            else:
                assert isinstance(self.discovery, EtcdDiscovery | KubernetesDiscovery | MemoryDiscovery), "no other"
                token = ClusterToken(self.discovery)
                await token.start()
            self._token = token
        return lambda: token.value

    async def drain(self, released: Callable[[], Awaitable[None]] | None = None) -> None:
        """Stop accepting work: leave discovery, refuse new calls, let those in progress finish before the deadline.

        Args:
            released: waits for what others may still ask of this process, until the same deadline.
        """
        await self._withdraw()
        self._refuse_calls()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self._drain_s
        while self.num_streams and loop.time() < deadline:
            await asyncio.sleep(0.02)
        for session in list(self._sessions):
            session.end_all("the process that served this had to stop", "lost")
        if released is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline):
                    await released()

    async def abandon(self) -> None:
        """Leave discovery and hang up on all callers: what they wait for will never come, so they look elsewhere.

        Callers see the connection break, and not only their calls end: from then on, none of them chooses this process,
        even if it does not hear of the withdrawal or knows no other process.
        """
        self._refuse_calls()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(WITHDRAWAL_S):
                await self._withdraw()
        await self.requests.stop_listening()
        for session in list(self._sessions):
            session.hang_up()

    async def close(self) -> None:
        """Leave: hang up on everybody and give up the lease."""
        if self._is_closed:
            return
        self._is_closed = True
        for client in self._clients:
            await client.close()
        await self.events.close()
        await self.requests.close()
        if self._token is not None:
            self._token.close()
        await self.discovery.close()

    async def shutdown(self) -> None:
        """Drain, then leave."""
        await self.drain()
        await self.close()

    def _is_answering(self, key: str) -> bool:
        """Return whether the process of a key in discovery, which ends in its id, answers us."""
        id = key.rpartition("/")[2]
        return any(client.is_answering(id) for client in self._clients)

    def _refuse_calls(self) -> None:
        for target in self._services:
            self._services[target] = _refuse

    async def _withdraw(self) -> None:
        """Remove our keys from discovery."""
        log.debug("removes %s from discovery", ", ".join(self._keys))
        outcomes = await asyncio.gather(*map(self.discovery.delete, self._keys), return_exceptions=True)
        if left := sum(isinstance(outcome, Exception) for outcome in outcomes):
            log.warning("%d of %d keys stay in discovery until their lease ends", left, len(outcomes))

    def _accept(self, channel: Channel) -> ClientSession:
        return ClientSession(channel, self._services, self._sessions)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await to_its_end(self.close())


class Namespace(NamedTuple):
    """A pipeline, usually a model: just a name."""

    runtime: DistributedRuntime
    name: str

    def component(self, name: str) -> "Component":
        """Name a component of it."""
        return Component(self.runtime, self.name, slug(name))


class Component(NamedTuple):
    """A load-balanced service of a pipeline: also just a name."""

    runtime: DistributedRuntime
    namespace: str
    name: str

    async def create_service(self) -> None:
        """Do nothing: programs written for Dynamo call this to create NATS services."""

    def endpoint(self, name: str) -> "Endpoint":
        """Name an endpoint of it."""
        return Endpoint(self.runtime, EndpointAddress(self.namespace, self.name, slug(name)))


class Endpoint(NamedTuple):
    """Something that can be called."""

    runtime: DistributedRuntime
    address: EndpointAddress

    async def serve_endpoint(self, handler: Callable[..., AsyncIterator[Any]]) -> None:
        """Serve an async generator function until the process is asked to stop, then drain.

        Args:
            handler: called with the request, and with a `Context` if it takes a second argument.
        """
        runtime, address = self.runtime, self.address
        await runtime.serve(address, GeneratorService(handler, lambda: runtime.dialects.get(address)))
        await runtime.stopping.wait()
        await runtime.drain()

    async def client(self) -> Client:
        """Return a client of this endpoint."""
        return await self.runtime.client(self.address)


def dynamo_worker(static: bool = False) -> Callable[[Callable[..., Awaitable[Any]]], Callable[..., Any]]:
    """Decorate a program's main coroutine: pass it a connected runtime, and close that when it returns.

    SIGTERM and SIGINT set `runtime.stopping`; then `serve_endpoint` drains and returns.

    Args:
        static: accepted for programs written for Dynamo; discovery is always on.
    """

    def decorate(main: Callable[..., Awaitable[Any]]) -> Callable[..., Any]:
        @functools.wraps(main)
        async def run(*args: Any, **kwargs: Any) -> Any:
            runtime = await DistributedRuntime.connect()
            stop_on_signals(runtime.stopping)
            try:
                return await main(runtime, *args, **kwargs)
            finally:
                await to_its_end(runtime.close())

        return run

    return decorate


async def _planes(
    config: RuntimeConfig, instance_id: int, discovery: AnyDiscovery
) -> tuple[RequestPlane, EventPlane, ClusterToken | None]:
    """Return how requests and events travel, and the token if they need it."""
    if isinstance(discovery, MemoryDiscovery):
        return *_planes_in_memory(config, instance_id, discovery), None
    if config.nats_server:
        nats = NatsPlane(config, instance_id)
        await nats.connect()
        return nats, nats, None
    if not isinstance(discovery, FolderDiscovery):
        host = config.rpc_host
        if (
            config.etcd_endpoints
            and config.is_etcd_open
            and host != "localhost"
            and not host.startswith(("127.", "::1"))
        ):
            log.warning(
                "etcd requires no password or certificate: anyone who reaches it may also call this process at %s", host
            )
        if isinstance(discovery, KubernetesDiscovery) and host == "127.0.0.1" and POD_IP not in os.environ:
            log.warning("%s is not set: other pods cannot reach this process; expected the pod's status.podIP", POD_IP)
        token = ClusterToken(discovery)
        await token.start()
        events = ZeroMqPlane(discovery, instance_id, path=None, host=host)
        return SocketPlane(host=host, token=token), events, token
    path = config.folder / f"{instance_id:x}"
    socket_name(path.with_suffix(".sock"))
    requests = SocketPlane(path=path.with_suffix(".sock"))
    events = ZeroMqPlane(discovery, instance_id, path=path.with_suffix(".zmq"), host="")
    discovery.keep(path.with_suffix(".sock"), requests.restore)
    discovery.keep(path.with_suffix(".zmq"), events.restore)
    return requests, events, None


def _planes_in_memory(
    config: RuntimeConfig, instance_id: int, discovery: MemoryDiscovery
) -> tuple[MemoryRequests, BrokeredEvents | DirectEvents]:
    node = discovery.node
    requests = MemoryRequests(node, instance_id, timeout_s=config.nats_timeout_s)
    if (broker := node.network.broker) is not None:
        return requests, BrokeredEvents(node, broker)
    return requests, DirectEvents(node, instance_id, discovery)


def _refuse(request: Any, stream: AnswerStream) -> None:
    stream.end("this process accepts no new requests", "draining")


__all__ = ["CallError", "Component", "DistributedRuntime", "Endpoint", "Namespace", "dynamo_worker"]
