"""Calls to the API server of the cluster that this process runs in.

Failures that may pass (429, 5xx, a lost connection) are retried a few times, after the time that the server asks for. A
token that it no longer accepts (401) is read again once. Redirects are not followed: the token would go with them.
"""

import asyncio
import logging
import ssl
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import aiohttp
import msgspec

from foundation.text import one_line
from serving.runtime.kubernetes.account import Account
from serving.runtime.kubernetes.objects import Change, ClusterObject, Page, Resource, Status
from serving.runtime.outages import Outages
from serving.runtime.ports import RuntimeUnavailableError
from serving.runtime.world import world

log = logging.getLogger(__name__)

ATTEMPTS = 4
PAUSE_S = 0.2
"""The wait before the second attempt; it doubles for each further one."""

MAX_PAUSE_S = 5.0
TIMEOUT = aiohttp.ClientTimeout(total=5)
WATCH_S = 30
"""How long a watch lasts before it is restarted: this replaces a connection that died unseen."""

WATCHING = aiohttp.ClientTimeout(total=None, sock_connect=5, sock_read=WATCH_S + 5)
PAGE = 500
"""How many objects a page of a list has, unless that makes an answer too long."""

MAX_PAGES = 1000
MAX_ANSWER_BYTES = 64 << 20
MAX_LINE_BYTES = 2 << 20
"""The longest line of a watch: longer than any object of ours."""

MERGE = {"Content-Type": "application/merge-patch+json"}

Kind = TypeVar("Kind", bound=ClusterObject)
Answer = TypeVar("Answer", bound=msgspec.Struct)


class ApiError(RuntimeUnavailableError):
    """The API server refused a call, or cannot be reached (status 0)."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status

    @property
    def is_passing(self) -> bool:
        """Whether the same call may succeed later."""
        return self.status in (0, 401, 410, 429) or self.status >= 500


class TooLongError(ApiError):
    """An answer is longer than we read."""


class GoneError(Exception):
    """The server no longer knows what changed since the version with which a watch started."""


class KubernetesApi:
    """The objects of one namespace."""

    def __init__(self, account: Account) -> None:
        """Prepare to call.

        Raises:
            RuntimeUnavailableError: the account's files cannot be read.
        """
        self.namespace = account.namespace
        self.outages = Outages("kubernetes", f"the API server at {account.server}")
        self._account = account
        try:
            trusted = ssl.create_default_context(cadata=account.authority)
        except (ssl.SSLError, ValueError) as error:
            raise RuntimeUnavailableError("ca.crt of the service account is not a certificate in PEM format") from error
        # Python 3.13 and later refuse authorities without a key identifier, which many clusters have.
        trusted.verify_flags &= ~ssl.VERIFY_X509_STRICT
        # No limit on connections: each watch holds one.
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=trusted, limit=0), read_bufsize=MAX_LINE_BYTES // 2
        )

    async def close(self) -> None:
        """Hang up."""
        await self._session.close()

    async def get(self, resource: Resource, kind: type[Kind], *names: str) -> Kind | None:
        """Return an object, None if it does not exist.

        Raises:
            ApiError: the server does not answer that.
        """
        try:
            return self._decoded(await self._call("get", resource, *names), kind)
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, resource: Resource, kind: type[Kind], *, labels: str = "", fields: str = ""
    ) -> tuple[dict[str, Kind], str]:
        """Return all objects that a selector matches, by name, and the version of this state.

        Raises:
            ApiError: the server does not answer that.
        """
        found: dict[str, Kind] = {}
        query, limit = _query(labels, fields), PAGE
        for _ in range(MAX_PAGES):
            try:
                page = self._decoded(await self._call("list", resource, query=query | {"limit": str(limit)}), Page)
            except TooLongError:
                if limit == 1:
                    raise
                limit = max(limit // 4, 1)
                continue
            for item in page.items or ():
                if (read := _read(item, kind, resource)) is not None:
                    found[read.metadata.name] = read
            if not page.metadata.continue_:
                return found, page.metadata.resource_version
            query["continue"] = page.metadata.continue_
        raise ApiError(f"the API server at {self._account.server} lists {resource.name} without end")

    async def create(self, resource: Resource, content: Mapping[str, Any]) -> ClusterObject | None:
        """Create an object; return None if one of this name exists.

        Raises:
            ApiError: the server refuses it.
        """
        body = {"apiVersion": resource.api_version, "kind": resource.kind, **content}
        try:
            return self._decoded(await self._call("create", resource, body=body), ClusterObject)
        except ApiError as error:
            if error.status == 409:
                return None
            raise

    async def patch(self, resource: Resource, *names: str, content: Mapping[str, Any]) -> ClusterObject:
        """Change parts of an object; if its metadata give a version, only that version.

        Raises:
            ApiError: the server refuses it: 404 if it does not exist, 409 if it has another version.
        """
        return self._decoded(await self._call("patch", resource, *names, body=content), ClusterObject)

    async def patch_unchanged(
        self, resource: Resource, name: str, version: str, content: Mapping[str, Any]
    ) -> str | None:
        """Change parts of an object if it still has this version; return its new version, None if it has another or is gone.

        Raises:
            ApiError: the server refuses it for another reason.
        """
        try:
            patched = await self.patch(resource, name, content={"metadata": {"resourceVersion": version}, **content})
        except ApiError as error:
            if error.status in (404, 409):
                return None
            raise
        return patched.metadata.resource_version

    async def delete(self, resource: Resource, name: str) -> None:
        """Remove an object, if it exists.

        Raises:
            ApiError: the server refuses it.
        """
        try:
            await self._call("delete", resource, name)
        except ApiError as error:
            if error.status != 404:
                raise

    async def watch(
        self, resource: Resource, kind: type[Kind], version: str, *, labels: str = "", fields: str = ""
    ) -> AsyncIterator[tuple[str, Kind | ClusterObject]]:
        """Yield the changes since a version: the event and the object; for a bookmark, only its metadata count.

        Raises:
            GoneError: the version is too old.
            ApiError: the watch broke.
            Exception: a change is not as expected or too long; the same watch would fail again.
        """
        query = _query(labels, fields) | {
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        try:
            async with await self._send("watch", resource, query=query) as response:
                if not _is_success(response):
                    raise await self._error(response, "watch", resource)
                async for line in response.content:
                    change = _parsed(line, Change)
                    if change.type == "ERROR":
                        raise self._refusal(_parsed(change.object, Status), "watch", resource)
                    read = _read(change.object, ClusterObject if change.type == "BOOKMARK" else kind, resource)
                    if read is not None:
                        yield change.type, read
        except ApiError as error:
            if error.status == 410:
                raise GoneError from error
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(error) from error

    async def _call(
        self, verb: str, resource: Resource, *names: str, query: Mapping[str, str] | None = None, body: Any = None
    ) -> bytes:
        """Call until it succeeds, or fails for good."""
        pause_s = PAUSE_S
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with await self._send(verb, resource, *names, query=query, body=body) as response:
                    if _is_success(response):
                        return await _whole(response)
                    error = await self._error(response, verb, resource, *names)
                    asked_s = _seconds(response.headers.get("Retry-After", ""))
            except (aiohttp.ClientError, OSError, ValueError) as trouble:
                error, asked_s = self._unreachable(trouble), 0.0
            if not error.is_passing or attempt == ATTEMPTS:
                raise error
            if error.status == 401:
                if attempt > 1:
                    raise error
                self._account.refresh()
                continue
            await asyncio.sleep(min(max(asked_s, pause_s * world().entropy.uniform(0.5, 1.0)), MAX_PAUSE_S))
            pause_s *= 2
        raise AssertionError("the last attempt returned or raised")

    async def _send(
        self, verb: str, resource: Resource, *names: str, query: Mapping[str, str] | None = None, body: Any = None
    ) -> aiohttp.ClientResponse:
        method = {"create": "POST", "patch": "PATCH", "delete": "DELETE"}.get(verb, "GET")
        try:
            headers = {"Authorization": f"Bearer {self._account.token}", "Accept": "application/json"}
        except RuntimeUnavailableError as error:
            raise ApiError(str(error)) from error
        data = None
        if body is not None:
            data = msgspec.json.encode(body)
            headers |= MERGE if verb == "patch" else {"Content-Type": "application/json"}
        try:
            response = await self._session.request(
                method,
                f"{self._account.server}{resource.path(self.namespace, *names)}",
                params=query,
                data=data,
                headers=headers,
                timeout=WATCHING if verb == "watch" else TIMEOUT,
                allow_redirects=False,
            )
        except (aiohttp.ClientError, OSError) as error:
            self.outages.begin(one_line(error))
            raise
        self.outages.end()
        return response

    def _decoded(self, data: bytes, kind: type[Answer]) -> Answer:
        try:
            return _parsed(data, kind)
        except ValueError as error:
            raise self._unreachable(error) from error

    async def _error(self, response: aiohttp.ClientResponse, verb: str, resource: Resource, *names: str) -> ApiError:
        try:
            status = _parsed(await _whole(response), Status)
        except (ValueError, TooLongError):  # a proxy may answer instead
            status = Status()
        status = msgspec.structs.replace(status, code=response.status)
        return self._refusal(status, verb, resource, *names)

    def _refusal(self, status: Status, verb: str, resource: Resource, *names: str) -> ApiError:
        what = "/".join([resource.name, *names[1:]])
        said = one_line(status.message or status.reason or "no reason was given")
        match status.code:
            case 401:
                text = "does not accept the token of this pod's service account (401); expected a valid one"
            case 403:
                text = (
                    f"does not let this pod {verb} {what} in namespace {self.namespace} (403); expected a Role that allows "
                    f"{verb} on {what} of API group {resource.group!r}, bound to its service account"
                )
            case 404 if verb == "create":
                text = (
                    f"has no namespace {self.namespace} (404: {said}); expected the pod's, or the one in POD_NAMESPACE"
                )
            case code if 300 <= code < 400:
                text = f"redirects to another address ({code}), which is not followed; expected an answer of its own"
            case _:
                text = f"refuses to {verb} {' '.join([what, *names[:1]])} in namespace {self.namespace} ({status.code}: {said})"
        return ApiError(f"the API server at {self._account.server} {text}", status.code)

    def _unreachable(self, error: BaseException) -> ApiError:
        return ApiError(f"the API server at {self._account.server} cannot be reached ({one_line(error)})")


def _is_success(response: aiohttp.ClientResponse) -> bool:
    return response.status < 300  # a redirect is none


def _query(labels: str, fields: str) -> dict[str, str]:
    return {name: text for name, text in (("labelSelector", labels), ("fieldSelector", fields)) if text}


async def _whole(response: aiohttp.ClientResponse) -> bytes:
    """Read an answer.

    Raises:
        TooLongError: it is too long.
    """
    parts, size = [], 0
    async for part in response.content.iter_any():
        parts.append(part)
        size += len(part)
        if size > MAX_ANSWER_BYTES:
            raise TooLongError(
                f"the API server at {response.url.origin()} answers with more than {MAX_ANSWER_BYTES} bytes"
            )
    return b"".join(parts)


def _read(raw: msgspec.Raw, kind: type[Kind], resource: Resource) -> Kind | None:
    """Read an object; log and skip one that is malformed."""
    try:
        return _parsed(raw, kind)
    except ValueError as error:
        log.warning("one of the %s is not as expected and is ignored: %s", resource.name, error)
        return None


def _parsed(data: bytes | msgspec.Raw, kind: type[Answer]) -> Answer:
    """Parse what the server sent.

    Raises:
        ValueError: it is not as expected.
    """
    try:
        return msgspec.json.decode(data, type=kind)
    except RecursionError as error:
        raise ValueError("JSON is nested too deeply") from error


def _seconds(text: str) -> float:
    return float(text) if text.isascii() and text.isdecimal() else 0.0
