"""Errors as clients see them: OpenAI's error body, with a status that fits the failure."""

import msgspec

from serving.router.decision import AllBusyError, AllFullError

ERROR_TYPES = {401: "authentication_error", 429: "rate_limit_error", 503: "service_unavailable_error"}
CALL_STATUS = {
    **dict.fromkeys(("overloaded", "full"), 429),
    **dict.fromkeys(("draining", "unknown", "unavailable"), 503),
    "invalid": 400,
    "lost": 502,
    "engine": 500,
}
"""The status for each kind of `CallError`."""


class ApiError(Exception):
    """An answer with OpenAI's error body."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        code: str | None = None,
        param: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.code = code
        self.param = param
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("retry-after", "1")
        if status in (408, 413, 414, 431):
            self.headers["connection"] = "close"  # the rest of the request is not read

    def body(self) -> bytes:
        """Encode the error object."""
        type = ERROR_TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        error = {"message": self.message, "type": type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class NoRouteError(ApiError):
    """There is no such path, or it does not accept the method."""


def failed_call(message: str, kind: str) -> ApiError:
    """Return the error for a client whose call to an instance ended with this message and kind of `CallError`."""
    return ApiError(CALL_STATUS.get(kind, 500), message)


def no_worker(error: Exception) -> ApiError:
    """Return the error for a client whose request no worker accepts."""
    match error:
        case AllFullError():
            return ApiError(429, "all workers are full, please retry later")
        case AllBusyError():
            return ApiError(503, "all workers are busy, please retry later")
    return ApiError(503, str(error))
