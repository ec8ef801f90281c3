"""The header X-Request-Id of every answer, if the server was told to send it."""

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADER = b"x-request-id"


class RequestIds:
    """An application whose answers repeat the id of their request, or have one of their own."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer."""
        given = dict(scope.get("headers", ())).get(HEADER) or secrets.token_hex(16).encode()

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (HEADER, given)]
            await send(message)

        await self._app(scope, receive, send_with_id)
