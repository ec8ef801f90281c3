"""What stands in front of all paths: keys, X-Request-Id, and addresses as FastAPI and uvicorn take them."""

import hmac
from collections.abc import Iterable, Sequence

from starlette.datastructures import URL
from starlette.responses import RedirectResponse
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serving.frontend.api.errors import ApiError
from serving.runtime.world import world
from serving.stand_in.vllm.answers.errors import error_response

GUARDED = ("/v1", "/v2", "/inference", "/cohere")
"""Starts of the paths that need a key, if there are keys."""

Headers = Iterable[tuple[bytes, bytes]]


class Everybody:
    """See `Admission`: who may pass has been decided before."""

    def refusal(self, method: str, path: str, headers: Headers, *, num_open: int, is_draining: bool) -> ApiError | None:
        """See `Admission`."""
        return None


class Front:
    """See the module."""

    def __init__(
        self, app: ASGIApp, *, keys: Iterable[str], root_path: str, has_request_ids: bool, paths: Sequence[str]
    ) -> None:
        """Stand in front of an application.

        Args:
            app: the application.
            keys: keys of which clients must send one.
            root_path: what addresses may start with, besides the paths that the application knows.
            has_request_ids: whether answers have X-Request-Id.
            paths: the paths that the application knows.
        """
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._root = root_path.rstrip("/")
        self._has_request_ids = has_request_ids
        self._known = [compile_path(path)[0] for path in paths]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it."""
        if scope["type"] != "http":
            return
        if self._has_request_ids:
            send = _with_request_id(scope, send)
        whole = scope["path"]
        path = self._below_root(whole)
        if self._keys and path.startswith(GUARDED) and scope["method"] != "OPTIONS" and not self._is_known(scope):
            await error_response(path, ApiError(401, "Unauthorized"))(scope, receive, send)
            return
        if path.endswith("/") and path != "/":
            if any(known.match(path.rstrip("/")) for known in self._known):
                url = URL(scope={**scope, "path": whole.rstrip("/"), "root_path": ""})
                await RedirectResponse(str(url))(scope, receive, send)
                return
            path += "-"  # an unknown one: nothing behind us may cut it to one that is known
        if path is not whole:
            scope = {**scope, "path": path}
        await self._app(scope, receive, send)

    def _below_root(self, path: str) -> str:
        root = self._root
        return path[len(root) :] or "/" if root and (path == root or path.startswith(f"{root}/")) else path

    def _is_known(self, scope: Scope) -> bool:
        """Return whether a request has one of the keys."""
        for name, value in scope["headers"]:
            if name == b"authorization":
                scheme, _, token = value.partition(b" ")
                matches = [hmac.compare_digest(token, key) for key in self._keys]  # all: the time tells nothing
                return scheme.lower() == b"bearer" and any(matches)
        return False


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Return what sends an answer with the client's X-Request-Id, or one of our own."""

    async def with_id(message: Message) -> None:
        if message["type"] == "http.response.start":
            given = dict(scope["headers"]).get(b"x-request-id")
            id = world().uuid().hex.encode() if given is None else given
            others = [(name, value) for name, value in message.get("headers", ()) if name.lower() != b"x-request-id"]
            message = {**message, "headers": [*others, (b"x-request-id", id)]}
        await send(message)

    return with_id
