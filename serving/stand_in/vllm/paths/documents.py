"""The description of the paths, and the pages that show it."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from serving.frontend.application import Route
from serving.frontend.model_info import json_response

REDIRECT = "/docs/oauth2-redirect"
TITLE = "FastAPI"
"""As FastAPI names an application without a name."""


class Documents:
    """The handlers."""

    def __init__(self, routes: list[Route], root_path: str) -> None:
        """Describe these routes, which a proxy in front may show under `root_path`."""
        self._root = root_path.rstrip("/")
        self._schema = schema(routes, self._root)

    async def on_schema(self, request: Request) -> Response:
        """GET /openapi.json."""
        return json_response(self._schema)

    async def on_docs(self, request: Request) -> Response:
        """GET /docs."""
        from fastapi.openapi.docs import get_swagger_ui_html  # half a second of each start

        return get_swagger_ui_html(
            openapi_url=f"{self._root}/openapi.json",
            title=f"{TITLE} - Swagger UI",
            oauth2_redirect_url=f"{self._root}{REDIRECT}",
        )

    async def on_redirect(self, request: Request) -> Response:
        """GET /docs/oauth2-redirect."""
        from fastapi.openapi.docs import get_swagger_ui_oauth2_redirect_html

        return get_swagger_ui_oauth2_redirect_html()

    async def on_redoc(self, request: Request) -> Response:
        """GET /redoc."""
        from fastapi.openapi.docs import get_redoc_html

        return get_redoc_html(openapi_url=f"{self._root}/openapi.json", title=f"{TITLE} - ReDoc")


def schema(routes: list[Route], root_path: str) -> dict[str, Any]:
    """Describe routes: their methods and what they do, not their fields."""
    paths: dict[str, dict[str, Any]] = {}
    for path, methods, handler in routes:
        for method in methods.split(", "):
            name = f"{handler.__name__}_{path}_{method}".lower()
            paths.setdefault(path, {})[method.lower()] = {
                "summary": f"{method} {path}",
                "operationId": "".join(letter if letter.isalnum() else "_" for letter in name),
                "responses": {"200": {"description": "Successful Response"}},
            }
    found: dict[str, Any] = {"openapi": "3.1.0", "info": {"title": TITLE, "version": "0.1.0"}, "paths": paths}
    return found | ({"servers": [{"url": root_path}]} if root_path else {})
