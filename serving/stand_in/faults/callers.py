"""Who may use the admin port.

Without a token, that is every program on this machine. A web page in a browser on it is none of them: a page can send
requests anywhere, and can give its own name our address. A browser says where a page is from (Origin), which name it
asked for (Host), and lets pages choose only a few types of bodies unless we agree.
"""

import hmac
import re
from collections.abc import Mapping

from serving.frontend.api.errors import ApiError
from serving.stand_in.faults.config import is_loopback

HOST = re.compile(r"\[?([^][@]+?)]?(:\d*)?")

OF_CURL = ("", "application/x-www-form-urlencoded")
"""What curl calls a body if nobody tells it the type. Forms in pages have the second type too, and an Origin."""


def check_caller(headers: Mapping[str, str], token: str) -> None:
    """Check that a request may be answered."""
    if not token:
        _check_local(headers)
        return
    scheme, _, given = headers.get("authorization", "").partition(" ")
    if not (scheme.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())):
        raise ApiError(401, "expected Authorization: Bearer with the token of --admin-token")


def _check_local(headers: Mapping[str, str]) -> None:
    host, origin = headers.get("host", ""), headers.get("origin")
    named = HOST.fullmatch(host)
    if named is None or not is_loopback(named[1].lower()):
        raise ApiError(403, f"Host is {host[:100]!r}; expected a loopback address or localhost, or an --admin-token")
    if origin is not None and origin != f"http://{host}":
        raise ApiError(
            403, f"Origin is {origin[:100]!r}; expected none: web pages may not ask without an --admin-token"
        )
    type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if type not in ("application/json", *(OF_CURL if origin is None else ())):
        raise ApiError(415, f"the body is {type[:100] or 'of no type'}; expected application/json")
